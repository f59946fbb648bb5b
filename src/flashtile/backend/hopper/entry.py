"""The Hopper backend's entries: results are allocated, tensors described to the copy engine, kernels launched."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Tensors, lse_shape, new_rows
from ...call.device import describe_device
from ...call.plan import Plan
from ..gpu import replay
from ..gpu.pointers import Described
from ..gpu.replay import Recorder, Results
from ..scalars import rows_last, score_units, slopes_stride, window_numbers
from .descriptors import boxes, packed_boxes
from .kernels.forward.forward import forward_kernel
from .lengths import lengths_of
from .semaphores import counter
from .tables import ROWS, Launch


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = replay.run(call.inputs, launch_forward, plan.tile.forward, call)
    return out, lse  # type: ignore[return-value]


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, and the function that repeats it for calls of the same layout."""
    recording, (out, lse) = replay.record(call.inputs, launch_forward, plan.tile.forward, call)
    return lambda call: recording(call.inputs), (out, lse)  # type: ignore[return-value]


def launch_forward(recorder: Recorder, tile: Launch, call: Call) -> Results:
    t = Tensors(*recorder.inputs)  # type: ignore[arg-type]
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    out = recorder.new(new_rows(t.q, q.shape[1], v.shape[-1], q.dtype))
    lse = recorder.new(q.new_empty(lse_shape(q), dtype=torch.float32))
    if q.numel() == 0:
        return out, lse
    packed = call.layout == "varlen"
    described = packed_boxes if packed else boxes
    pointers = {
        "q_desc": Described(q, described, (ROWS, tile.head_dim.box)),
        "k_desc": Described(k, described, (tile.block_n, tile.head_dim.box)),
        "v_desc": Described(v, described, (tile.block_n, tile.head_dim_v.box)),
        "out_desc": Described(out, described, (ROWS, min(tile.head_dim_v.box, tile.staged))),
        "lse": lse,
        "counter": recorder.op(partial(counter, q.device, packed)),
        "slopes": recorder.contiguous(t.alibi_slopes),
        "sinks": recorder.contiguous(t.sinks),
        "cu_seqlens_q": recorder.contiguous(t.cu_seqlens_q),
        "cu_seqlens_k": recorder.contiguous(t.cu_seqlens_k),
        "seqused_k": recorder.contiguous(t.seqused_k),
    }
    recorder.launch(forward_kernel, pointers, *launch_scalars(call, tile))
    return out, lse


def __getattr__(name: str) -> Any:
    """Import the backward pass at its first use: its kernels take a third of the time that all take to import."""
    if name not in ("backward", "record_backward"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import host_backward

    globals()[name] = getattr(host_backward, name)
    return globals()[name]


def launch_scalars(call: Call, tile: Launch) -> tuple[int, dict[str, Any]]:
    """Programs, and the arguments of the kernel that are no tensors."""
    t = call.tensors
    lengths = lengths_of(call, tile.block_m)
    return min(describe_device(t.q.device).cores, lengths["num_tiles"]), {
        **lengths,
        "stride_lse": lengths["seqlen_q"],
        **score_units(call),
        **window_numbers(call),
        "stride_slopes_b": 0 if t.alibi_slopes is None else slopes_stride(t.alibi_slopes),
        "num_heads": t.q.shape[1],
        "group": t.q.shape[1] // t.k.shape[1],
        "TILE": tile,
        "num_warps": 4,
    }
