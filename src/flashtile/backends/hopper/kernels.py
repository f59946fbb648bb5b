"""The Hopper backend's entries: results are allocated, tensors described to the copy engine, kernels launched."""

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...call import Call, new_rows
from ...device import describe_device
from ...plan import Plan
from ..common.launch import launch, on_device
from .forward import forward_kernel
from .support import LONGEST
from .tables import ROWS, Launch

LOG2E = math.log2(math.e)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
MOST_COUNTERS = 256
SECTION_BYTES = 16 * 2**20  # keys and values that the L2 cache keeps while others pass


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    tile: Launch = plan.tile.forward
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    out = new_rows(q, q.shape[1], v.shape[-1], q.dtype)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    slopes, sinks = call.tensors.alibi_slopes, call.tensors.sinks
    with on_device(q):
        pointers = {
            "q_desc": boxes(q, ROWS),
            "k_desc": boxes(k, tile.block_n),
            "v_desc": boxes(v, tile.block_n),
            "out_desc": boxes(out, ROWS),
            "lse": lse,
            "slopes": None if slopes is None else slopes.contiguous(),
            "sinks": None if sinks is None else sinks.contiguous(),
            "counter": counter(q.device),
        }
        launch(forward_kernel, (tile, call.signature()), pointers, lambda: numbers(call, tile))
    return out, lse


def numbers(call: Call, tile: Launch) -> tuple[int, dict[str, Any]]:
    """Programs, and the arguments of the kernel that are no tensors."""
    t, s = call.tensors, call.settings
    batch, heads, seqlen_q, _ = t.q.shape
    heads_k, seqlen_k = t.k.shape[1:3]
    blocks = -(-seqlen_q // tile.block_m)
    # The softmax can take the scale where nothing stands between the product and the exponential.
    folded = s.scale > 0 and s.softcap is None and t.alibi_slopes is None
    return min(describe_device(t.q.device).cores, blocks * heads * batch), {
        "stride_slopes_b": 0 if t.alibi_slopes is None or t.alibi_slopes.dim() == 1 else heads,
        "num_tiles": blocks * heads * batch,
        "num_blocks": blocks,
        "all_heads": heads * batch,
        "section": section(call, heads // heads_k),
        "num_heads": heads,
        "group": heads // heads_k,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "diagonal": s.diagonal + s.i0 - s.j0,
        "window_left": None if s.window_left is None else min(s.window_left, LONGEST),
        "window_right": None if s.window_right is None else min(s.window_right, LONGEST),
        "top_left": s.i0 - s.j0 if s.top_left else None,
        "factor": s.scale * LOG2E if folded else LOG2E,
        "multiplier": None if folded else s.scale,
        "softcap": s.softcap,
        "TILE": tile,
        "num_warps": 4,
    }


def section(call: Call, group: int) -> int:
    """Heads that are worked on together: where rows see different numbers of keys, as many as the L2 cache holds."""
    if call.settings.window.unlimited:
        return group
    k, v = call.tensors.k, call.tensors.v
    of_one = k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    return group * max(1, SECTION_BYTES // of_one)


def rows_last(x: Tensor) -> Tensor:
    """The tensor with contiguous features, which costs a copy if they were not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def boxes(x: Tensor, rows: int) -> TensorDescriptor:
    """`[B, H, S, D]` as the copy engine sees it, in boxes of `rows`: what a box holds past the last row is 0, and is
    not written.
    """
    found = object.__new__(TensorDescriptor)  # whose own checks, repeated for each call, take longer than the launch
    found.__dict__.update(box_fields(x.shape, x.stride(), x.dtype, rows), base=x)
    return found


@functools.lru_cache(maxsize=4096)
def box_fields(shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int) -> dict[str, Any]:
    box = [1, 1, rows, shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[dtype])
    return {"shape": list(shape), "strides": list(strides), "block_shape": box, "layout": layout, "padding": "zero"}


counters: dict[tuple[torch.device, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """A zero that a launch counts with and leaves at zero. Launches on one stream take turns with it; a captured launch
    may be replayed beside others, and has its own.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        key = (device, torch.cuda.current_stream(device).cuda_stream)
        if key not in counters:
            if len(counters) >= MOST_COUNTERS:
                del counters[next(iter(counters))]
            counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
        return counters[key]
    return torch.zeros(1, dtype=torch.int32, device=device)
