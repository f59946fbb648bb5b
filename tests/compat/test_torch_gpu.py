"""PyTorch's own attention functions in flashtile on a GPU: calls that reach it, their order, CUDA graphs."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as native

import flashtile.compat.torch as names
from flashtile import private_torch
from flashtile.compat.torch import kernels

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def randn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to("cuda", dtype)


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """Names of the operators that run in flashtile."""
    seen: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def run(*positional: Any, **keywords: Any) -> Any:
            seen.append(name)
            return function(*positional, **keywords)

        return run

    changed = {key: {name: noted(name, f) for name, f in group.items()} for key, group in kernels.OPERATORS.items()}
    with mock.patch.object(kernels, "OPERATORS", changed):
        yield seen


Q, K = (2, 8, 256, 64), (2, 2, 256, 64)
REACHING: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "bfloat16": ({"dtype": torch.bfloat16}, True),
    "causal": ({"is_causal": True}, True),
    "scale": ({"scale": 0.3}, True),
    "grouped heads": ({"key": K, "value": K, "enable_gqa": True}, True),
    "other lengths": ({"key": (2, 8, 100, 64), "value": (2, 8, 100, 64)}, True),
    "head dimension 256": ({"query": (1, 2, 64, 256), "key": (1, 2, 64, 256), "value": (1, 2, 64, 256)}, True),
    "causal of other lengths": ({"key": (2, 8, 100, 64), "value": (2, 8, 100, 64), "is_causal": True}, False),
    "mask": ({"attn_mask": (256, 256)}, False),
    "float32": ({"dtype": torch.float32}, False),
    "head dimension 512": ({"query": (1, 2, 64, 512), "key": (1, 2, 64, 512), "value": (1, 2, 64, 512)}, False),
    "another head_dim_v": ({"value": (2, 8, 256, 32)}, False),
    "three dimensions": ({"query": Q[1:], "key": Q[1:], "value": Q[1:]}, False),
    "broadcast batches": ({"key": (1, *Q[1:]), "value": (1, *Q[1:])}, False),
}


@pytest.mark.parametrize("kind", REACHING)
def test_calls_that_reach_flashtile(kind: str, calls: list[str]) -> None:
    """The table of docs/switching.md, for CUDA, with results as without activation."""
    options, reaches = REACHING[kind]
    settings = dict(options)
    dtype = settings.pop("dtype", torch.float16)
    shapes = [settings.pop(name, Q) for name in ("query", "key", "value")]
    tensors = [randn(*shape, dtype=dtype, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    if "attn_mask" in settings:
        settings["attn_mask"] = torch.ones(settings["attn_mask"], device="cuda").tril().bool()
    reference = native(*tensors, **settings)
    dout = randn(*reference.shape, dtype=dtype, seed=3)
    expected = torch.autograd.grad(reference, tensors, dout)
    with names.activate():
        out = native(*tensors, **settings)
        found = torch.autograd.grad(out, tensors, dout)
    operator = "_scaled_dot_product_flash_attention"
    assert calls == ([operator, f"{operator}_backward"] if reaches else [])
    tolerance = 3e-2 if dtype == torch.bfloat16 else 4e-3
    for a, b in zip((out, *found), (reference, *expected), strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("ends", ["in the block", "after the block"])
def test_dropout_stays_with_pytorch(ends: str) -> None:
    """The same bits as without activation, forward and backward: flashtile could not repeat PyTorch's mask."""
    tensors = [randn(*Q[:2], (128, 160, 160)[n], 64, seed=n).requires_grad_() for n in range(3)]
    dout = randn(*Q[:2], 128, 64, seed=3)

    def results(forward: Any, backward: Any) -> list[Tensor]:
        torch.manual_seed(0)
        with forward, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = native(*tensors, dropout_p=0.3)
        with backward:
            return [out, *torch.autograd.grad(out, tensors, dout)]

    expected = results(nullcontext(), nullcontext())
    found = results(names.activate(), names.activate() if ends == "in the block" else nullcontext())
    assert torch.equal(found[0], expected[0])
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 4e-3 * max(1.0, float(b.abs().max()))  # dq is added up in any order


def test_varlen_without_keys_backward_after_the_block() -> None:
    """Rows of a sequence without keys have FlashAttention's log-sum-exp, +inf: their gradients are 0, not NaN."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    q, k, v = (randn((96, 64, 64)[n], 4, 64, seed=n).requires_grad_() for n in range(3))
    offsets = [torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([0, 32, 96], [0, 0, 64])]
    dout = randn(96, 4, 64, seed=3)
    expected = torch.autograd.grad(varlen.varlen_attn(q, k, v, *offsets, 64, 64), (q, k, v), dout)
    with names.activate():
        out = varlen.varlen_attn(q, k, v, *offsets, 64, 64)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), dout), expected, strict=True):
        assert (a - b).abs().max() <= 4e-3 * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize(("rows", "keys"), [(100, 256), (256, 256)])
def test_causal_bias_of_other_lengths(rows: int, keys: int, calls: list[str]) -> None:
    """PyTorch's operator aligns `is_causal` to the last query and key, and its `CausalBias` relies on that."""
    q, k, v = (randn(2, 8, (rows, keys, keys)[n], 64, seed=n) for n in range(3))
    bias = causal_lower_right(rows, keys)
    reference = native(q, k, v, attn_mask=torch.ones(rows, keys, device="cuda").tril(keys - rows).bool())
    with names.activate():
        out = native(q, k, v, attn_mask=bias)
    assert calls == ["_scaled_dot_product_flash_attention"]
    assert (out - reference).abs().max() <= 4e-3


def test_a_last_dimension_that_is_not_contiguous_does_not_reach_flashtile(calls: list[str]) -> None:
    q = randn(*Q).mT.contiguous().mT
    with names.activate():
        native(q, q, q)
    assert not calls


FRESH = """
import torch, flashtile.compat.torch as ours
from flashtile import private_torch
with ours.activate():
    q = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.float16)
    torch.nn.functional.scaled_dot_product_attention(q, q, q)
    print(private_torch.get_sdp_priority_order()[0])
torch.nn.functional.scaled_dot_product_attention(q, q, q)
print(private_torch.get_sdp_priority_order())
"""


def test_the_order_in_a_fresh_process() -> None:
    """PyTorch's first choice on CUDA sets the order; it must not undo ours, and stands after the end."""
    found = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=120, check=True)
    q = randn(1, 2, 64, 64)
    native(q, q, q)
    assert found.stdout.split("\n")[:2] == ["1", str(private_torch.get_sdp_priority_order())]


def packed_reference(q: Tensor, pages: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One query of each sequence over its pages, in float64: `[B, H, D]`."""
    rows = []
    for b, n in enumerate(lengths.tolist()):
        k, v = (x[table[b].long()].flatten(0, 1)[:n].double().transpose(0, 1) for x in pages)
        rows.append(native(q[b, :, None].double(), k, v)[:, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("by", ["flashtile", "PyTorch"])
@torch.no_grad()
def test_varlen_attn_in_a_graph(by: str) -> None:
    """One graph for all steps: lengths, pages and queries change in place. By flashtile's names with paged caches, and
    by PyTorch's own function, activated, over packed tokens.
    """
    batch, heads, width, own, page = 3, 4, 64, 4, 16
    lengths = torch.tensor([5, 33, 64], dtype=torch.int32, device="cuda")
    q, out = randn(batch, heads, width), torch.empty(batch, heads, width, device="cuda", dtype=torch.float16)
    pages = randn(2, batch * own, page, heads, width, seed=1)
    table = torch.arange(batch * own, device="cuda", dtype=torch.int32).view(batch, own)
    rows = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    tokens = [x.flatten(0, 1) for x in pages]
    begins = torch.cat((rows[:1] * 0, lengths.cumsum(0).int()))

    def step() -> None:
        if by == "flashtile":
            names.varlen_attn_out(
                out, q, *pages, rows, None, 1, own * page, enable_gqa=True, seqused_k=lengths, block_table=table
            )
        else:
            out.copy_(varlen.varlen_attn(q, *tokens, rows, begins, 1, own * page))

    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if by == "PyTorch":
        names.activate()
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    finally:
        names.restore()
    for new in ([5, 33, 64], [64, 1, 7]):
        lengths.copy_(torch.tensor(new))
        begins.copy_(torch.cat((rows[:1] * 0, lengths.cumsum(0).int())))
        table.copy_(table.flatten()[torch.randperm(table.numel(), device="cuda")].view_as(table))
        q.add_(1)
        out.zero_()
        graph.replay()
        if by == "flashtile":
            expected = packed_reference(q, pages, table, lengths)
        else:
            cuts = [slice(a, b) for a, b in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)]
            parts = [[x[cut].double().transpose(0, 1) for x in tokens] for cut in cuts]
            expected = torch.stack([native(q[b, :, None].double(), *parts[b])[:, 0] for b in range(batch)])
        assert (out - expected).abs().max() < 4e-3 * max(1.0, float(expected.abs().max()))
