"""Entry points of the Triton backend: forward, backward, and attention with a KV cache."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.cache import CacheCall, as_pages, paged_call, rows_in_order, rows_of_table
from ...call.cache import append_and_rotate as in_operations
from ...call.cache_tensors import CacheTensors
from ...call.call import Call, Tensors, new_rows, row_stats_shape, split_row_stats
from ...call.plan import Plan
from ..gpu import replay
from ..gpu.block_lists import block_lists, summary
from ..gpu.kernel import Kernel
from ..gpu.pairs import with_aligned_bias, with_contiguous_keys
from ..gpu.replay import Recorder
from ..replays import ForwardReplay, Results
from ..scalars import lse_strides, rows_last, splits_of, strides
from . import arguments as args
from . import host_products
from .called import called_tile
from .constants import TRANSPOSED_ROWS
from .formulas import launch
from .gradients import residual_of
from .host_append import append_and_rotate
from .semaphores import new_semaphores

FORWARD = Kernel(f"{__package__}.kernels.forward", "forward_kernel")
ALIGNED_FROM = 64  # rows and keys above which copying a bias with unaligned rows pays


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    return call.keep(replay.run(call.inputs, launch_forward, plan, call))


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, and the function that repeats it for calls of the same layout."""
    recording, results = replay.record(call.inputs, launch_forward, plan, call)
    return ForwardReplay(recording), call.keep(results)


def launch_forward(recorder: Recorder, plan: Plan, call: Call) -> Results:
    call = call._replace(tensors=Tensors.from_flat(recorder.inputs))
    if plan.tile.products is not None:
        return host_products.launch_forward(recorder, call)
    return launch_attention(recorder, plan, call)


def launch_attention(recorder: Recorder, plan: Plan, call: Call, *, in_order: bool = False) -> Results:
    """Record the forward pass of a call whose tensors belong to the recorder; returns `out`, `lse` and, with lists of a
    mask tensor, the states of its blocks. `in_order`: each sequence's page has its number.
    """
    call = with_aligned_bias(recorder, with_contiguous_keys(recorder, call), ALIGNED_FROM)
    t = call.tensors
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    row_stats = args.new_result(recorder, call, q.new_empty(row_stats_shape(call), dtype=torch.float32), -torch.inf)
    lse = split_row_stats(q, row_stats)[0]
    out = t.out
    if out is None:
        out = args.new_result(recorder, call, new_rows(t.q, q.shape[1], v.shape[-1], q.dtype), 0)
    config, pack_gqa = called_tile(plan.tile, call).forward, plan.tile.pack_gqa
    splits = splits_of(call, plan.num_splits, config.block_n)
    align = args.alignment([q, k, v, out])
    tiles = args.num_tiles(call, config.block_m, pack_gqa)
    programs = tiles * (q.shape[1] // pack_gqa) * args.dense_batch(q)
    partials: dict[str, Tensor | None] = dict.fromkeys(("partial_out", "partial_lse", "partial_residual"))
    semaphores = None
    if splits > 1:
        # Partial results have the rows of lse: [splits, B, H, S, Dv] or [splits, H, T, Dv].
        rows = splits, *lse.shape
        layouts = {"partial_out": ((*rows, v.shape[-1]), torch.float32), "partial_lse": (rows, torch.float32)}
        layouts |= {"partial_residual": (rows, torch.float32)} if call.keeps_residual else {}
        partials |= recorder.workspace(row_stats, layouts)
        semaphores = recorder.op(partial(new_semaphores, q.device, programs))
    whole = pack_gqa == 1 and splits == 1 and config.block_m > TRANSPOSED_ROWS
    sizes = config.block_m, config.block_n
    states = summary(recorder, call, *sizes) if whole else None
    lists, list_strides = block_lists(recorder, call, *sizes, states) if whole else ({}, {})
    residual = recorder.op(residual_of, row_stats) if call.keeps_residual else None
    results = {"out": out, "lse": row_stats, "residual": residual, "semaphores": semaphores}
    launch(
        recorder,
        call,
        FORWARD,
        args.pointers(recorder, call, q, k, v) | partials | results | {"sinks": t.sinks} | lists,
        programs * splits,
        {
            **args.shared_scalars(call, q, k, v, align),
            **list_strides,
            **strides("out", out, align),
            **lse_strides(lse),
            **args.constants(call, config, align, pack_gqa, splits, in_order),
            "stride_partials_split": None if splits == 1 else lse.numel(),
            "num_tiles": tiles,
        },
    )
    return (out, row_stats) if states is None else (out, row_stats, states)


def __getattr__(name: str) -> Any:
    """Import the backward pass on first use: its kernels take a third of the import time of all kernels."""
    if name not in ("backward", "record_backward"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import host_backward

    globals()[name] = getattr(host_backward, name)
    return globals()[name]


def attend_with_cache(plan: Plan, call: CacheCall) -> tuple[Tensor, Tensor]:
    """Append, rotate and attend: at most three launches, instead of some thirty operations."""
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        return forward(plan, in_operations(call))
    out, lse = replay.run(call.inputs, launch_with_cache, plan, call)
    return out, lse  # type: ignore[return-value]


def record_attend_with_cache(plan: Plan, call: CacheCall) -> tuple[Any, tuple[Tensor, Tensor]]:
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        repeat, results = record_forward(plan, in_operations(call))
        return lambda call: repeat(in_operations(call)), results
    recording, (out, lse) = replay.record(call.inputs, launch_with_cache, plan, call)
    return ForwardReplay(recording), (out, lse)  # type: ignore[return-value]


def appendable(cache: CacheTensors, cu_seqlens_q: Tensor | None) -> bool:
    """Whether the kernel can write into the cache: its features are contiguous, it has sequences, and new keys are
    packed like the queries.
    """
    sizes = (*cache.cache_seqlens.shape, *(() if cache.page_table is None else cache.page_table.shape))
    contiguous = cache.k_cache.stride(-1) == 1 and cache.v_cache.stride(-1) == 1
    alike = cache.k is None or cache.k.dim() == (4 if cu_seqlens_q is None else 3)
    return contiguous and 0 not in sizes and alike and cache.cu_seqlens_k_new is None


def append(call: CacheCall) -> Call:
    """Append and rotate by a kernel; what remains is the attention over pages, of this backend or another one."""
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        return in_operations(call)
    return attention_after(call, replay.run(call.inputs, launch_append, call))


def record_append(call: CacheCall) -> tuple[Any, Call]:
    """As `append`, and the function that repeats it for calls of the same layout."""
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        return in_operations, in_operations(call)
    recording, results = replay.record(call.inputs, launch_append, call)
    return lambda call: attention_after(call, recording(call.inputs)), attention_after(call, results)


def launch_append(recorder: Recorder, given: CacheCall) -> Results:
    """The queries, and the number of keys of each sequence after the call."""
    t = launch_before_attention(recorder, given).tensors
    return t.q, t.seqused_k


def attention_after(call: CacheCall, results: Results) -> Call:
    """The attention over pages that follows `launch_append`."""
    q, lengths = results
    assert q is not None
    k, v, table = as_pages(call.cache, call.cache.cache_seqlens.shape[0])
    tensors = call.tensors._replace(
        q=q, k=k, v=v, seqused_k=lengths, page_table=table, leftpad_k=call.cache.leftpad_k
    )  # fmt: skip
    return Call(tensors, call.settings, is_plain_eager=call.is_plain_eager)


def launch_with_cache(recorder: Recorder, plan: Plan, given: CacheCall) -> Results:
    in_order = given.cache.page_table is None and given.cache.cache_batch_idx is None
    return launch_attention(recorder, plan, launch_before_attention(recorder, given), in_order=in_order)


def launch_before_attention(recorder: Recorder, given: CacheCall) -> Call:
    """Append and rotate; returns the attention that remains. Its tensors belong to the recorder."""
    here = len(Tensors._fields) - 1
    after = here + len(CacheTensors._fields)
    features = Tensors.from_flat((*recorder.inputs[:here], *recorder.inputs[after:]))
    cache = CacheTensors(*recorder.inputs[here:after])  # type: ignore[arg-type]
    call = paged_call(Call(features, given.settings), cache)
    t = call.tensors
    assert t.page_table is not None
    recorder.view(cache.k_cache, t.k)
    recorder.view(cache.v_cache, t.v)
    rows = cache.page_table if cache.page_table is not None else cache.cache_batch_idx
    if cache.page_table is not None and cache.cache_batch_idx is not None:
        t = t._replace(page_table=recorder.op(rows_of_table, cache.page_table, cache.cache_batch_idx))
    elif rows is not None:
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
        call = append_and_rotate(recorder, call, cache, given.rotary)
    return call


def total_of_packed(lengths: Tensor, cu_seqlens_q: Tensor) -> Tensor:
    """Keys of each sequence after the call: a packed call appends as many keys as it has queries."""
    return lengths + cu_seqlens_q.diff().long()
