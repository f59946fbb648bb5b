"""The launches of forward mode: forward with `out` in float32, then the kernel of the tangents."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ....call.call import Call, Needs, Tangents, lse_shape, new_rows
from ....call.device import describe_device
from ....call.plan import Plan
from ...gpu.kernel import Kernel
from ...gpu.pairs import with_contiguous_keys
from ...gpu.pointers import Described, Pointers
from ...gpu.replay import Recorder
from ...replays import Results, with_inputs
from ...scalars import head_strides, head_terms, rows_last, strides, window_numbers
from ..tile_config import ALIGN, MMA_M, TangentsConfig
from . import KERNELS, formulas
from .descriptors import dense_descriptor, ragged_descriptor, tma_aligned
from .distance_table import with_distance_table
from .forward import forward_config, launch_rows, lse_of, residual_of
from .scheduler_args import query_group, scheduler_args
from .semaphores import tile_count_semaphore

TANGENTS = Kernel(f"{KERNELS}.tangents.tangents", "tangents_kernel")


def launch_tangents(recorder: Recorder, plan: Plan, call: Call, moves: Needs) -> Results:
    """Record the pass; the recorder's inputs are the call's, then the tangents of inputs that move. Returns `out`,
    `lse`, `dout` and `dlse`.
    """
    call, tangents = with_inputs(call, moves, recorder.inputs)
    t = call.tensors
    config = replace(plan.tile.tangents, moves_q=moves.q, moves_k=moves.k, moves_v=moves.v)
    out, dout = (recorder.new(new_rows(t.q, t.q.shape[1], t.v.shape[-1], t.q.dtype)) for _ in range(2))
    dlse = recorder.new(t.q.new_empty(lse_shape(t.q), dtype=torch.float32))
    unrounded = recorder.new(new_rows(t.q, t.q.shape[1], t.v.shape[-1], torch.float32))
    first = forward_config(plan, call)
    assert first.kind == "half"  # `support` declines float32
    first = first.in_float32 if first.splits == 1 else first
    row_stats, _ = launch_rows(recorder, first, call._replace(tensors=t._replace(out=None)), unrounded)
    results = {
        "unrounded": unrounded, "out": out, "dout": dout, "dlse": dlse,
        "lse": recorder.op(lse_of, t.q, row_stats),
        "residual": recorder.op(residual_of, row_stats) if call.keeps_residual else None,
    }  # fmt: skip
    launch_rest(recorder, config, call, tangents, results)
    return out, row_stats, dout, dlse


def launch_rest(recorder: Recorder, config: TangentsConfig, call: Call, tangents: Tangents, results: Pointers) -> None:
    """Launch the kernel of the tangents."""
    call = with_contiguous_keys(recorder, with_distance_table(recorder, call))
    t = call.tensors
    packed = t.cu_seqlens_q is not None
    make_descriptor = ragged_descriptor if packed else dense_descriptor
    rows, columns, columns_v = MMA_M, config.head_dim.box, config.head_dim_v.box
    boxes = {"q": (rows, columns), "k": (config.block_n, columns), "v": (config.block_n, columns_v)}
    inputs = {name: recorder.op(rows_last, x) for name, x in zip(boxes, t[:3], strict=True)}
    moving = {name: x for name, x in zip(boxes, tangents[:3], strict=True) if x is not None}
    descriptors: dict[str, Described | None] = {f"d{name}_desc": None for name in boxes}
    descriptors |= {f"{name}_desc": Described(x, make_descriptor, boxes[name]) for name, x in inputs.items()}
    descriptors |= {
        f"d{name}_desc": Described(recorder.op(tma_aligned, x), make_descriptor, boxes[name])
        for name, x in moving.items()
    }
    q, v = inputs["q"], inputs["v"]
    pointers = {
        **descriptors,
        **results,
        "tile_count_semaphore": recorder.op(partial(tile_count_semaphore, q.device, packed)),
        **{symbol: recorder.contiguous(x) for symbol, x in head_terms(t).items()},
        "cu_seqlens_q": recorder.contiguous(t.cu_seqlens_q),
        "cu_seqlens_k": recorder.contiguous(t.cu_seqlens_k),
        "seqused_k": recorder.contiguous(t.seqused_k),
    }
    scheduling = scheduler_args(call, config)
    scalars = {
        **scheduling,
        **formulas.units(call),
        **window_numbers(call),
        **head_strides(t, absent=0),
        "lse_stride": scheduling["seqlen_q"],
        "num_heads": q.shape[1],
        "group": query_group(call),
        "scale": call.settings.scale,
        "columns": config.head_dim_v.columns_of(v),
        "CONFIG": config.compiled,
        "num_warps": 4,
    }
    for name in ("unrounded", "out", "dout"):
        x = results[name]
        assert isinstance(x, Tensor)
        scalars |= strides(name, x, ALIGN)
    programs = min(describe_device(q.device).cores, scheduling["num_tiles"])
    formulas.launch(recorder, call, TANGENTS, pointers, programs, scalars, partial=True)
