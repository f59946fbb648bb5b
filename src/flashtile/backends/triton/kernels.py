"""The Triton backend's entries in front of its kernels: passes over a call's tensors, run on the tensors' device."""

import torch
from torch import Tensor

from ...cache import CacheTensors
from ...cache import append_and_rotate as in_operations
from ...call import Call, Tensors, lse_shape, new_rows
from ...plan import Plan
from ...problem import power_of_two
from ..common import passes
from ..common.arguments import lse_strides, rows_last, strides
from ..common.passes import Recorder, Results
from . import arguments as args
from .append import append_kernel
from .combine import combine_kernel
from .forward import forward_kernel
from .gradients import backward
from .tables import Launch

__all__ = ["append_and_rotate", "backward", "forward"]


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    q = call.tensors.q
    key = ("forward", plan.tile, plan.num_splits, args.precision(q.dtype), call.signature())
    out, lse = passes.run(key, call.tensors[:-1], record_forward, plan, call)
    assert out is not None
    assert lse is not None
    return out, lse


def record_forward(recorder: Recorder, plan: Plan, call: Call) -> Results:
    call = call._replace(tensors=Tensors(*recorder.given))  # type: ignore[arg-type]
    t = call.tensors
    q, k, v = (recorder.computed(rows_last, x) for x in t[:3])
    out = recorder.new(new_rows(q, q.shape[1], v.shape[-1], q.dtype))
    lse = recorder.new(q.new_empty(lse_shape(q), dtype=torch.float32))
    launch_shape: Launch = plan.tile.forward
    pack, splits = plan.tile.pack, call.settings.num_splits or plan.num_splits
    found, found_lse, part = out, lse, out
    if splits > 1:
        # The parts' results have the rows of lse: [splits, B, H, S, Dv] or [splits, H, T, Dv].
        found_lse = recorder.new(lse.new_empty((splits, *lse.shape)))
        found = recorder.new(lse.new_empty((*found_lse.shape, v.shape[-1])))
        part = found[0] if out.dim() == 4 else found[0].transpose(0, 1)
    align = args.alignment([q, k, v, part])
    tiles = args.num_tiles(call, launch_shape.block_m, pack)
    recorder.launch(
        forward_kernel,
        args.pointers(recorder, call, q, k, v) | {"sinks": t.sinks, "out": found, "lse": found_lse},
        tiles * (q.shape[1] // pack) * args.dense_batch(q) * splits,
        {
            **args.inputs(call, q, k, v, align),
            **strides("out", part, align),
            **lse_strides(lse),
            **args.tiled(launch_shape, tiles),
            "stride_out_split": found.stride(0),
            "stride_lse_split": found_lse.stride(0),
            "PACK": pack,
            "SPLITS": splits,
        },
    )
    if splits > 1:
        numbers = {
            **strides("out", out, 1),
            **lse_strides(lse),
            "stride_lse_split": found_lse.stride(0),
            "num_heads_q": q.shape[1],
            "total_q": lse.shape[-1],
            "DV": v.shape[-1],
            "WIDTH": power_of_two(v.shape[-1]),
            "SPLITS": splits,
            "PARTS": power_of_two(splits),
            "num_warps": 4,
        }
        parts = {"partial_out": found, "partial_lse": found_lse, "out": out, "lse": lse}
        recorder.launch(combine_kernel, parts, lse.numel(), numbers)
    return out, lse


def append_and_rotate(call: Call, cache: CacheTensors, interleaved: bool) -> Call:
    """As `flashtile.cache.append_and_rotate`, in one launch instead of some thirty operations."""
    if cache.k is None and cache.rotary_cos is None:
        return call
    t = call.tensors
    assert t.page_table is not None
    # A copy of the cache would not be the cache; and a table without columns has nothing to look at.
    if t.k.stride(-1) != 1 or t.v.stride(-1) != 1 or t.page_table.shape[1] == 0:
        return in_operations(call, cache, interleaved)
    given = (*t[:-1], cache.k, cache.v, cache.rotary_cos, cache.rotary_sin, cache.cache_seqlens)
    (turned,) = passes.run(("append", interleaved, call.signature()), given, record_append, call, interleaved)
    return call if turned is None else Call(t._replace(q=turned), call.settings, call.signature())


def record_append(recorder: Recorder, call: Call, interleaved: bool) -> Results:
    *features, new_k, new_v, cos, sin, lengths = recorder.given
    call = call._replace(tensors=Tensors(*features))  # type: ignore[arg-type]
    t = call.tensors
    assert t.page_table is not None
    q = recorder.computed(rows_last, t.q)
    given = (new_k, new_v, cos, sin)
    new_k, new_v, cos, sin = (None if x is None else recorder.computed(rows_last, x) for x in given)
    pointers = {
        "q": q,
        "turned": None if cos is None else recorder.new(new_rows(q, q.shape[1], q.shape[-1], q.dtype)),
        "k_cache": t.k,
        "v_cache": t.v,
        "new_k": new_k,
        "new_v": new_v,
        "cos": cos,
        "sin": sin,
        "lengths": lengths,
        "page_table": recorder.computed(rows_last, t.page_table),
        "cu_seqlens_q": t.cu_seqlens_q,
    }
    numbers = args.new_tokens(call, pointers) | {"INTERLEAVED": interleaved, "num_warps": 1}
    programs = numbers["num_tiles"] * (numbers["num_heads_q"] + numbers["num_heads_k"]) * args.dense_batch(q)
    recorder.launch(append_kernel, pointers, programs, numbers)
    return (pointers["turned"],)
