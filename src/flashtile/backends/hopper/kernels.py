"""The Hopper backend's entries: results are allocated, tensors described to the copy engine, kernels launched."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

from ...call import Call
from ...device import describe_device
from ...plan import Plan
from ...remember import remember
from ..common.arguments import new_results, rows_last, score_units, slopes_stride, window_numbers
from ..common.launch import current_stream, launch, on_device
from ..common.pointers import Described
from .forward import forward_kernel
from .tables import END, ROWS, Launch

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
MOST_COUNTERS = 256
SECTION_BYTES = 16 * 2**20  # keys and values that the L2 cache keeps while others pass


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    tile: Launch = plan.tile.forward
    t = call.tensors
    q, k, v = rows_last(t.q), rows_last(t.k), rows_last(t.v)
    out, lse = new_results(call, q, v.shape[-1])
    if q.numel() == 0:
        return out, lse
    packed = call.layout == "varlen"
    described = packed_boxes if packed else boxes
    with on_device(q):
        pointers = {
            "q_desc": Described(q, described, ROWS),
            "k_desc": Described(k, described, tile.block_n),
            "v_desc": Described(v, described, tile.block_n),
            "out_desc": Described(out, described, ROWS),
            "lse": lse,
            "counter": counter(q.device, packed),
            "slopes": contiguous(t.alibi_slopes),
            "sinks": contiguous(t.sinks),
            "cu_seqlens_q": contiguous(t.cu_seqlens_q),
            "cu_seqlens_k": contiguous(t.cu_seqlens_k),
            "seqused_k": contiguous(t.seqused_k),
        }
        launch(forward_kernel, (tile, call.signature()), pointers, lambda: numbers(call, tile))
    return out, lse


def contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def numbers(call: Call, tile: Launch) -> tuple[int, dict[str, Any]]:
    """Programs, and the arguments of the kernel that are no tensors."""
    t = call.tensors
    group = t.q.shape[1] // t.k.shape[1]
    lengths = dense_lengths(call, tile, group) if t.cu_seqlens_q is None else packed_lengths(call, tile)
    return min(describe_device(t.q.device).cores, lengths["num_tiles"]), {
        **lengths,
        **score_units(call),
        **window_numbers(call),
        "stride_slopes_b": 0 if t.alibi_slopes is None else slopes_stride(t.alibi_slopes),
        "num_heads": t.q.shape[1],
        "group": group,
        "TILE": tile,
        "num_warps": 4,
    }


def dense_lengths(call: Call, tile: Launch, group: int) -> dict[str, int]:
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    blocks = -(-seqlen_q // tile.block_m)
    return {
        "num_tiles": blocks * heads * batch,
        "num_blocks": blocks,
        "all_heads": heads * batch,
        "section": section(call, group),
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": call.tensors.k.shape[2],
        "stride_lse": seqlen_q,
    }


def packed_lengths(call: Call, tile: Launch) -> dict[str, int]:
    """Tokens; tiles as many as there can be, those of tokens that belong to no sequence included."""
    tokens, heads, _ = call.tensors.q.shape
    assert call.tensors.cu_seqlens_q is not None
    batch = call.tensors.cu_seqlens_q.shape[0] - 1
    return {
        "num_tiles": (tokens // tile.block_m + batch + 1) * heads,
        "num_blocks": 0,
        "all_heads": 0,
        "section": 0,
        "batch": batch,
        "seqlen_q": tokens,
        "seqlen_k": call.tensors.k.shape[0],
        "stride_lse": tokens,
    }


def section(call: Call, group: int) -> int:
    """Heads that are worked on together: where rows see different numbers of keys, as many as the L2 cache holds."""
    if call.settings.window.unlimited:
        return group
    k, v = call.tensors.k, call.tensors.v
    of_one = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return group * max(1, SECTION_BYTES // of_one)


def boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """`[B, H, S, D]` as the copy engine sees it, in boxes of `rows`: what a box holds past the last row is 0, and is
    not written.
    """
    return descriptor(x, x.shape, x.stride(), (1, 1, rows, x.shape[-1]))


def packed_boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """`[T, H, D]` as the copy engine sees it, so that boxes end with any sequence, not only with the last token.

    Token `first + i` of a sequence that ends before token `stop` has the coordinates `(END, stop, head, END - length +
    i, 0)`. Addresses are computed modulo 2**64, where `END` times the first stride and `END` times the fourth one are
    0 together; and the fourth dimension has END entries, so that `i >= length` lies outside. The copy engine knows no
    tensor without rows: it gets one that nothing reads.
    """
    x = x if len(x) > 0 else x.new_zeros((1, *x.shape[1:]))
    token, head = x.stride()[:2]
    strides = (2**34 - token, token, head, token, 1)
    return descriptor(x, (2**31 - 1, 2**31 - 1, x.shape[1], END, x.shape[-1]), strides, (1, 1, 1, rows, x.shape[-1]))


def descriptor(x: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorDescriptor:
    found = object.__new__(TensorDescriptor)  # whose own checks, repeated for each call, take longer than the launch
    found.__dict__.update(base=x, shape=list(shape), strides=list(strides), block_shape=list(box), padding="zero")
    found.layout = layout_of(tuple(box), x.dtype)
    return found


@functools.cache
def layout_of(box: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[dtype])


counters: dict[tuple[torch.device, int], Tensor] = {}


def counter(device: torch.device, packed: bool) -> Tensor:
    """A zero that a launch counts with. One of dense sequences leaves it at zero: launches on a stream share it.
    A captured one may run beside others, and has its own.
    """
    if packed or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = (device, current_stream())
    if (known := counters.get(key)) is not None:
        return known
    return remember(counters, key, torch.zeros(1, dtype=torch.int32, device=device), MOST_COUNTERS)
