"""Offsets, lengths and page tables of 32 and of 64 bits: Triton's frontend takes each kernel of a call, with the types
of its loops' values. Without a GPU, and without the rest of a compilation.
"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from flashtile.backend.gpu.kernel import Kernel
from flashtile.backend.hopper.kernels.shared.padded_rows import token_of
from flashtile.backend.hopper.kernels.shared.pages import PageTable
from flashtile.backend.hopper.kernels.shared.tile_scheduler import SeqlenInfo, key_range, token_range
from flashtile.prebuilt.build import source_of
from flashtile.prebuilt.launches import device_of, launches
from flashtile.prebuilt.standard import StandardCall

H200 = device_of("sm_90")


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def packed_call(head_dim: int, dtype: torch.dtype, index: torch.dtype) -> StandardCall:
    """Of three sequences, as a nested tensor's values and offsets are."""
    x, offsets = empty(6000, 4, head_dim, dtype=dtype), empty(4, dtype=index)
    arguments = {"q": x, "k": x, "v": x, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "causal": True}
    return StandardCall("attention_varlen", arguments | {"seqused_k": empty(3, dtype=index)}, backward=True)


def paged_call(index: torch.dtype) -> StandardCall:
    pages = empty(64, 64, 4, 128)
    arguments: dict[str, Any] = {"q": empty(900, 4, 128), "k": pages, "v": pages, "cu_seqlens_q": empty(4, dtype=index)}
    arguments |= {"seqused_k": empty(3, dtype=index), "page_table": empty(3, 20, dtype=index), "causal": True}
    return StandardCall("attention_varlen", arguments)


CALLS = {
    "fused backward": lambda index: packed_call(64, torch.bfloat16, index),
    "split backward": lambda index: packed_call(256, torch.bfloat16, index),
    "float32": lambda index: packed_call(128, torch.float32, index),
    "pages": paged_call,
}


def parse(source: Any, target: Any, options: dict[str, Any]) -> None:
    """Run Triton's frontend on a kernel."""
    backend = make_backend(target)
    parsed, context = backend.parse_options(options), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source.make_ir(target, parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context)


@gluon.jit
def ranges_kernel(cu_seqlens, seqused, batch, tokens):
    pages: gl.constexpr = PageTable(None, None, None, None, None)
    seqlens = SeqlenInfo(tokens, tokens, cu_seqlens, cu_seqlens, seqused, batch, pages)
    for x in gl.static_range(2):
        gl.static_assert(token_range(cu_seqlens, 0, batch, tokens)[x].dtype == gl.int32)
        gl.static_assert(key_range(seqlens, 0)[x].dtype == gl.int32)
    gl.static_assert(token_of(cu_seqlens, 0, tokens).dtype == gl.int32)


@pytest.mark.parametrize("index", ["*i64", "*i32"])
def test_ranges_have_32_bits(index: str) -> None:
    signature = {"cu_seqlens": index, "seqused": index, "batch": "i32", "tokens": "i32"}
    parse(GluonASTSource(ranges_kernel, signature), GPUTarget("cuda", 90, 32), {})


@pytest.mark.slow
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize("name", CALLS)
def test_kernels_take_indices_of_both_sizes(name: str, index: torch.dtype) -> None:
    with torch.no_grad():
        made = [x for x in launches(CALLS[name](index), H200) if isinstance(x.kernel, Kernel)]
    assert any("hopper" in x.kernel.title for x in made)
    for launch in made:
        parse(*source_of(launch, "sm_90"))
