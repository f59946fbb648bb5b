"""Entry points of the Hopper backend: allocate results, describe tensors for TMA, launch kernels."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Tensors, lse_shape, new_rows
from ...call.device import describe_device
from ...call.plan import Plan
from ..gpu import replay
from ..gpu.kernel import Kernel
from ..gpu.pointers import Described
from ..gpu.replay import Recorder, Results
from ..scalars import head_strides, head_terms, rows_last, score_units, window_numbers
from .descriptors import dense_descriptor, ragged_descriptor
from .scheduler_args import scheduler_args
from .semaphores import tile_count_semaphore
from .tables import MMA_M, ForwardConfig

FORWARD = Kernel(f"{__package__}.kernels.forward.forward", "forward_kernel")


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call."""
    out, lse = replay.run(call.inputs, launch_forward, plan.tile.forward, call)
    return out, lse  # type: ignore[return-value]


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, and the function that repeats it for calls of the same layout."""
    recording, (out, lse) = replay.record(call.inputs, launch_forward, plan.tile.forward, call)
    return lambda call: recording(call.inputs), (out, lse)  # type: ignore[return-value]


def launch_forward(recorder: Recorder, config: ForwardConfig, call: Call) -> Results:
    """Record the launches of a forward pass."""
    t = Tensors.from_flat(recorder.inputs)
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    out = recorder.new(new_rows(t.q, q.shape[1], v.shape[-1], q.dtype))
    lse = recorder.new(q.new_empty(lse_shape(q), dtype=torch.float32))
    if q.numel() == 0:
        return out, lse
    packed = call.layout == "varlen"
    make_descriptor = ragged_descriptor if packed else dense_descriptor
    pointers = {
        "q_desc": Described(q, make_descriptor, (MMA_M, config.head_dim.box)),
        "k_desc": Described(k, make_descriptor, (config.block_n, config.head_dim.box)),
        "v_desc": Described(v, make_descriptor, (config.block_n, config.head_dim_v.box)),
        "out_desc": Described(out, make_descriptor, (MMA_M, min(config.head_dim_v.box, config.epilogue_columns))),
        "lse": lse,
        "tile_count_semaphore": recorder.op(partial(tile_count_semaphore, q.device, packed)),
        **{symbol: recorder.contiguous(x) for symbol, x in head_terms(t).items()},
        "sinks": recorder.contiguous(t.sinks),
        "cu_seqlens_q": recorder.contiguous(t.cu_seqlens_q),
        "cu_seqlens_k": recorder.contiguous(t.cu_seqlens_k),
        "seqused_k": recorder.contiguous(t.seqused_k),
    }
    recorder.launch(FORWARD, pointers, *launch_scalars(call, config))
    return out, lse


def __getattr__(name: str) -> Any:
    """Import the backward pass on first use: its kernels take a third of the time to import all kernels."""
    if name not in ("backward", "record_backward"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import host_backward

    globals()[name] = getattr(host_backward, name)
    return globals()[name]


def launch_scalars(call: Call, config: ForwardConfig) -> tuple[int, dict[str, Any]]:
    """Number of programs, and the kernel's scalar arguments."""
    t = call.tensors
    scheduling = scheduler_args(call, config.block_m)
    return min(describe_device(t.q.device).cores, scheduling["num_tiles"]), {
        **scheduling,
        "stride_lse": scheduling["seqlen_q"],
        **score_units(call),
        **window_numbers(call),
        **head_strides(t, absent=0),
        "num_heads": t.q.shape[1],
        "group": t.q.shape[1] // t.k.shape[1],
        "CONFIG": config,
        "num_warps": 4,
    }
