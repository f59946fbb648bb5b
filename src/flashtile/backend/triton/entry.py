"""The Triton backend's entries in front of its kernels: passes over a call's tensors, run on the tensors' device."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.cache import CacheCall, CacheTensors, paged_call, rows_in_order
from ...call.cache import append_and_rotate as in_operations
from ...call.call import Call, Tensors, lse_shape, new_rows
from ...call.plan import Plan
from ...call.problem import power_of_two
from ..gpu import replay
from ..gpu.replay import Recorder, Results
from ..scalars import lse_strides, rows_last, strides
from . import arguments as args
from .kernels.append import append_kernel
from .kernels.forward import forward_kernel
from .semaphores import counters
from .tables import Launch


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = replay.run(call.inputs, launch_forward, plan, call)
    return out, lse  # type: ignore[return-value]


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, and the function that repeats it for calls of the same layout."""
    recording, (out, lse) = replay.record(call.inputs, launch_forward, plan, call)
    return lambda call: recording(call.inputs), (out, lse)  # type: ignore[return-value]


def launch_forward(recorder: Recorder, plan: Plan, call: Call) -> Results:
    return attend(recorder, plan, call._replace(tensors=Tensors(*recorder.inputs)))  # type: ignore[arg-type]


def attend(recorder: Recorder, plan: Plan, call: Call) -> Results:
    """`out` and `lse` of a call whose tensors are the recorder's."""
    t = call.tensors
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    out = recorder.new(new_rows(t.q, q.shape[1], v.shape[-1], q.dtype))
    lse = recorder.new(q.new_empty(lse_shape(q), dtype=torch.float32))
    launch_shape: Launch = plan.tile.forward
    pack, splits = plan.tile.pack, call.settings.num_splits or plan.num_splits
    align = args.alignment([q, k, v, out])
    tiles = args.num_tiles(call, launch_shape.block_m, pack)
    programs = tiles * (q.shape[1] // pack) * args.dense_batch(q)
    partial_lse, partial_out, arrived = None, None, None
    if splits > 1:
        # The parts' results have the rows of lse: [splits, B, H, S, Dv] or [splits, H, T, Dv].
        partial_lse = recorder.new(lse.new_empty((splits, *lse.shape)))
        partial_out = recorder.new(lse.new_empty((*partial_lse.shape, v.shape[-1])))
        arrived = recorder.op(partial(counters, q.device, programs))
    parts = {"partial_out": partial_out, "partial_lse": partial_lse, "arrived": arrived}
    recorder.launch(
        forward_kernel,
        args.pointers(recorder, call, q, k, v) | parts | {"sinks": t.sinks, "out": out, "lse": lse},
        programs * splits,
        {
            **args.inputs(call, q, k, v, align),
            **strides("out", out, align),
            **lse_strides(lse),
            **args.tiled(launch_shape, tiles),
            "stride_part": None if partial_lse is None else partial_lse.stride(0),
            "PACK": pack,
            "SPLITS": splits,
            "WIDTH": power_of_two(v.shape[-1]),
        },
    )
    return out, lse


def __getattr__(name: str) -> Any:
    """Import the backward pass at its first use: its kernels take a third of the time that all take to import."""
    if name not in ("backward", "record_backward"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import host_backward

    globals()[name] = getattr(host_backward, name)
    return globals()[name]


def attend_with_cache(plan: Plan, call: CacheCall) -> tuple[Tensor, Tensor]:
    """Everything that a call with a KV cache does: at most three launches, instead of some thirty operations."""
    if not appendable(call.cache):
        return forward(plan, in_operations(call))
    out, lse = replay.run(call.inputs, launch_with_cache, plan, call)
    return out, lse  # type: ignore[return-value]


def record_attend_with_cache(plan: Plan, call: CacheCall) -> tuple[Any, tuple[Tensor, Tensor]]:
    if not appendable(call.cache):
        return None, forward(plan, in_operations(call))
    recording, (out, lse) = replay.record(call.inputs, launch_with_cache, plan, call)
    return lambda call: recording(call.inputs), (out, lse)  # type: ignore[return-value]


def appendable(cache: CacheTensors) -> bool:
    """Whether the cache itself can be written: a copy of it would not be the cache. And there has to be something to
    look at.
    """
    table = cache.cache_seqlens if cache.page_table is None else cache.page_table
    return cache.k_cache.stride(-1) == 1 and cache.v_cache.stride(-1) == 1 and 0 not in table.shape


def launch_with_cache(recorder: Recorder, plan: Plan, given: CacheCall) -> Results:
    here = len(Tensors._fields) - 1
    features = Tensors(*recorder.inputs[:here])  # type: ignore[arg-type]
    cache = CacheTensors(*recorder.inputs[here:])  # type: ignore[arg-type]
    call = paged_call(Call(features, given.settings), cache)
    t = call.tensors
    assert t.page_table is not None
    recorder.view(cache.k_cache, t.k)
    recorder.view(cache.v_cache, t.v)
    rows = cache.page_table if cache.page_table is not None else cache.cache_batch_idx
    if rows is not None:
        recorder.view(rows, t.page_table)
    else:
        batch, device = len(t.page_table), t.page_table.device
        t = t._replace(page_table=recorder.op(partial(rows_in_order, batch, device)))
    if cache.k is not None and features.cu_seqlens_q is not None:
        t = t._replace(seqused_k=recorder.op(total_of_packed, cache.cache_seqlens, features.cu_seqlens_q))
    elif cache.k is not None:
        t = t._replace(seqused_k=recorder.new(torch.empty_like(cache.cache_seqlens)))  # filled in by `append_kernel`
    call = call._replace(tensors=t)
    if cache.k is not None or cache.rotary_cos is not None:
        call = append_and_rotate(recorder, call, cache, given.interleaved)
    return attend(recorder, plan, call)


def total_of_packed(lengths: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Keys of each sequence once those beside its queries are appended."""
    return lengths + cu_seqlens_q.diff().long()


def append_and_rotate(recorder: Recorder, call: Call, cache: CacheTensors, interleaved: bool) -> Call:
    """As `flashtile.call.cache.append_and_rotate`. All tensors are the recorder's."""
    t = call.tensors
    assert t.page_table is not None
    q = recorder.op(rows_last, t.q)
    given = (cache.k, cache.v, cache.rotary_cos, cache.rotary_sin)
    new_k, new_v, cos, sin = (None if x is None else recorder.op(rows_last, x) for x in given)
    turned = None if cos is None else recorder.new(new_rows(t.q, q.shape[1], q.shape[-1], q.dtype))
    pointers = {
        "q": q,
        "turned": turned,
        "k_cache": t.k,
        "v_cache": t.v,
        "new_k": new_k,
        "new_v": new_v,
        "cos": cos,
        "sin": sin,
        "lengths": cache.cache_seqlens,
        "totals": t.seqused_k if new_k is not None and t.cu_seqlens_q is None else None,
        "page_table": recorder.op(rows_last, t.page_table),
        "cu_seqlens_q": t.cu_seqlens_q,
    }
    scalars = args.new_tokens(call, pointers) | {"INTERLEAVED": interleaved, "num_warps": 1}
    programs = scalars["num_tiles"] * (scalars["num_heads_q"] + scalars["num_heads_k"]) * args.dense_batch(q)
    recorder.launch(append_kernel, pointers, programs, scalars)
    return call if turned is None else call._replace(tensors=t._replace(q=turned))
