"""The launches of a forward pass: its results, TMA descriptors and scalar arguments."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call, Tensors, new_rows, row_stats_shape, split_row_stats
from ....call.device import describe_device
from ....call.plan import Plan
from ....call.problem import rows_of_page
from ...gpu import replay
from ...gpu.kernel import Kernel
from ...gpu.pairs import with_contiguous_keys
from ...gpu.pointers import Described, Pointers
from ...gpu.replay import Recorder
from ...replays import Results
from ...scalars import head_strides, head_terms, rows_last, splits_of, strides, window_numbers
from ..tile_config import ALIGN, COMBINE_ROWS, MMA_M, Float32Forward, ForwardConfig, LatentForward
from . import KERNELS, float32
from .bias_tiles import FORWARD_SHARE, forward_tiles, with_aligned_rows
from .block_lists import NO_LISTS, NO_POINTERS, mask_states, row_lists
from .descriptors import dense_descriptor, pages_descriptor, ragged_descriptor
from .distance_table import with_distance_table
from .formulas import launch, units
from .scheduler_args import query_group, rest_of_waves, scheduler_args
from .semaphores import tile_count_semaphore

FORWARD = Kernel(f"{KERNELS}.forward.forward", "forward_kernel")
WIDE_FORWARD = Kernel(f"{KERNELS}.wide.forward", "wide_forward_kernel")
COMBINE = Kernel(f"{KERNELS}.combine", "combine_kernel")


class ForwardResults(NamedTuple):
    """Results by rows."""

    out: Tensor
    lse: Tensor
    residual: Tensor | None  # residual of lse (`Call.keeps_residual`)


def forward_config(plan: Plan, call: Call) -> ForwardConfig | Float32Forward | LatentForward:
    """The configuration with the number of splits, which the caller may choose where queries are dense."""
    config, num_splits = plan.tile.forward, call.settings.requested_splits
    if config.kind == "float32" or call.tensors.cu_seqlens_q is not None:
        return config
    chosen = config if num_splits is None else replace(config, last_splits=1)
    return chosen.with_splits(splits_of(call, plan.num_splits, chosen.block_n))


def called_forward(plan: Plan, call: Call) -> ForwardConfig | Float32Forward | LatentForward:
    """The configuration that a call runs. A plan serves a bucket of calls, and its own may differ."""
    config, recorder = forward_config(plan, call), Recorder(call.inputs, keep=False)
    if config.kind == "latent" or config.kind == "eight_bit":
        return config
    if config.kind == "float32":
        return config.with_parts(float32.num_parts())
    call = with_contiguous_keys(recorder, call._replace(tensors=Tensors.from_flat(recorder.inputs)))
    with replay.collected_launches():
        call = with_aligned_rows(recorder, call, config, FORWARD_SHARE)
    return forward_tiles(call, config)[0]


def launch_forward(recorder: Recorder, config: ForwardConfig | Float32Forward, call: Call) -> Results:
    """Record the launches of a forward pass; with lists of a mask tensor, there is a third result: the states of its
    blocks.
    """
    if config.kind == "float32":
        return float32.launch_forward(recorder, config, call)
    t = Tensors.from_flat(recorder.inputs)
    out = recorder.new(new_rows(t.q, t.q.shape[1], t.v.shape[-1], t.q.dtype)) if t.out is None else t.out
    row_stats, states = launch_rows(recorder, config, call._replace(tensors=t), out)
    return (out, row_stats) if states is None else (out, row_stats, states)


def launch_rows(recorder: Recorder, config: ForwardConfig, call: Call, out: Tensor) -> tuple[Tensor, Tensor | None]:
    """Record the launches that fill `out`, for a call of the recorder's tensors; returns `lse`, with its residual where
    that is kept, and the states of blocks that backward takes over, or `None`.
    """
    t = call.tensors
    row_stats = recorder.new(t.q.new_empty(row_stats_shape(call), dtype=torch.float32))
    if t.q.numel() == 0:
        return row_stats, None
    residual = recorder.op(residual_of, row_stats) if call.keeps_residual else None
    rows = ForwardResults(out, recorder.op(lse_of, t.q, row_stats), residual)
    call = with_contiguous_keys(recorder, with_distance_table(recorder, call))
    call = with_aligned_rows(recorder, call, config, FORWARD_SHARE)
    config, bias_pointers = forward_tiles(call, config)
    whole = config.splits == 1
    states = mask_states(recorder, call) if whole else None
    sizes = config.block_m, config.block_n
    lists, scalars = row_lists(recorder, call, *sizes, states) if whole else (NO_POINTERS, NO_LISTS)
    left = last_tiles(call, config) if config.last_splits > 1 else 0
    launch_tiles(recorder, config, call, rows, lists | bias_pointers, scalars, left)
    if left > 0:
        rest, results = of_last_wave(recorder, call, rows, left * config.block_m)
        launch_tiles(recorder, config.with_splits(config.last_splits), rest, results, lists | bias_pointers, scalars)
    return row_stats, states


def lse_of(q: Tensor, row_stats: Tensor) -> Tensor:
    return split_row_stats(q, row_stats)[0]


def residual_of(row_stats: Tensor) -> Tensor:
    return row_stats[1]


def launch_tiles(
    recorder: Recorder,
    config: ForwardConfig,
    call: Call,
    results: ForwardResults,
    more_pointers: Pointers,
    more_scalars: Any,
    left_out: int = 0,
) -> None:
    """Launch the kernel for all tiles but the last ones, which are left out, and the merge of splits."""
    rows = results if config.splits == 1 else new_results(recorder, call.tensors.q, config, results)
    pointers = tile_pointers(recorder, call, config, rows, config.head_dim_v.box) | {"residual": rows.residual}
    programs, scalars = launch_scalars(call, config, left_out)
    scalars |= {**page_scalars(call.tensors), **more_scalars}
    kernel = FORWARD if config.column_warpgroups == 1 else WIDE_FORWARD
    launch(recorder, call, kernel, {**pointers, **more_pointers}, programs, scalars)
    if config.splits > 1:
        combine_splits(recorder, config, rows, results)


def tile_pointers(
    recorder: Recorder, call: Call, config: ForwardConfig, rows: ForwardResults, columns: int
) -> dict[str, Any]:
    """The pointers of a call that all forward kernels take; results are stored by at most so many columns."""
    t = call.tensors
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    packed, paged = t.cu_seqlens_q is not None, t.page_table is not None
    make_descriptor = ragged_descriptor if packed else dense_descriptor
    describe_keys = pages_descriptor if paged else make_descriptor
    return {
        "q_desc": Described(q, make_descriptor, (MMA_M, config.head_dim.box)),
        "k_desc": Described(k, describe_keys, config.box_of_keys(config.head_dim)),
        "v_desc": Described(v, describe_keys, config.box_of_keys(config.head_dim_v)),
        "out_desc": Described(rows.out, make_descriptor, (MMA_M, min(columns, config.epilogue_columns))),
        "lse": rows.lse,
        "tile_count_semaphore": recorder.op(partial(tile_count_semaphore, q.device, packed)),
        **{symbol: recorder.contiguous(x) for symbol, x in head_terms(t).items()},
        "sinks": recorder.contiguous(t.sinks),
        "cu_seqlens_q": recorder.contiguous(t.cu_seqlens_q),
        "cu_seqlens_k": None if paged else recorder.contiguous(t.cu_seqlens_k),
        "seqused_k": recorder.contiguous(paged_seqlens(recorder, t) if paged else t.seqused_k),
        "page_table": None if t.page_table is None else recorder.op(rows_last, t.page_table),
    }


def last_tiles(call: Call, config: ForwardConfig) -> int:
    """Tiles that are left after whole waves of them, if they are rows of the last head."""
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    blocks = -(-seqlen_q // config.block_m)
    left = rest_of_waves(batch * heads * blocks, describe_device(call.tensors.q.device).cores)
    return left if left <= blocks else 0


def of_last_wave(recorder: Recorder, call: Call, results: ForwardResults, num_rows: int) -> tuple[Call, ForwardResults]:
    """The call that a divided last wave is, of the first rows of the last head, and where its results are."""
    t = call.tensors
    of_rows = partial(rows_of_last_head, num_rows)
    q, out, lse = (recorder.op(of_rows, x) for x in (t.q, results.out, results.lse))
    residual = None if results.residual is None else recorder.op(of_rows, results.residual)
    k, v = (recorder.op(partial(rows_of_last_head, None), x) for x in (t.k, t.v))
    return call._replace(tensors=t._replace(q=q, k=k, v=v)), ForwardResults(out, lse, residual)


def rows_of_last_head(rows: int | None, x: Tensor) -> Tensor:
    """The first rows, or all of them, of the last head of `x [B, H, S, ...]`."""
    return x[-1:, -1:, :rows]


def paged_seqlens(recorder: Recorder, t: Tensors) -> Tensor:
    """The number of keys of each sequence in pages."""
    if t.seqused_k is not None:
        return t.seqused_k
    assert t.cu_seqlens_k is not None
    return recorder.op(Tensor.diff, t.cu_seqlens_k)


def page_scalars(t: Tensors) -> dict[str, int | None]:
    """The kernel's scalar arguments for pages `[P, page_size, H, D]`."""
    if t.page_table is None:
        return dict.fromkeys(("stride_page_table_b", "num_pages", "page_size", "rows_of_page"))
    return {
        "stride_page_table_b": t.page_table.stride(0),
        "num_pages": t.k.shape[0],
        "page_size": t.k.shape[1],
        "rows_of_page": rows_of_page(t.k),
    }


def new_results(
    recorder: Recorder, q: Tensor, config: ForwardConfig | LatentForward, results: ForwardResults
) -> ForwardResults:
    """Results of the splits of a dense call, which `combine_splits` merges: out `[splits * B, H, Sq, Dv]` and lse, with
    its residual if `results` have one.
    """
    batch, heads, seqlen_q, _ = q.shape
    rows = config.splits * batch, heads, seqlen_q
    layouts = {"out": ((*rows, config.head_dim_v.width), torch.float32), "lse": (rows, torch.float32)}
    layouts |= {} if results.residual is None else {"residual": (rows, torch.float32)}
    workspace = recorder.workspace(q, layouts)
    return ForwardResults(workspace["out"], workspace["lse"], workspace.get("residual"))


def combine_splits(
    recorder: Recorder, config: ForwardConfig | LatentForward, partials: ForwardResults, results: ForwardResults
) -> None:
    """Launch the kernel that merges the splits' results."""
    out = results.out
    batch, heads, seqlen_q, _ = out.shape
    num_tiles = -(-seqlen_q // COMBINE_ROWS)
    pointers = {**results._asdict(), **{f"partial_{name}": x for name, x in partials._asdict().items()}}
    scalars: dict[str, Any] = {
        **strides("out", out, ALIGN),
        "num_tiles": num_tiles,
        "num_heads": heads,
        "total_heads": batch * heads,
        "seqlen_q": seqlen_q,
        "columns": config.head_dim_v.columns_of(out),
        "num_splits": config.splits,
        "HEAD_DIM_V": config.head_dim_v,
        "ALIGN": ALIGN,
        "BLOCK_M": COMBINE_ROWS,
        "num_warps": 4,
    }
    recorder.launch(COMBINE, pointers, num_tiles * batch * heads, scalars)


def launch_scalars(call: Call, config: ForwardConfig, left_out: int = 0) -> tuple[int, dict[str, Any]]:
    """Number of programs, and the kernel's scalar arguments."""
    t = call.tensors
    scheduling = scheduler_args(call, config)
    scheduling["num_tiles"] = (scheduling["num_tiles"] - left_out) * config.splits
    programs = describe_device(t.q.device).cores * config.programs_per_core
    return min(programs, scheduling["num_tiles"]), {
        **scheduling,
        "stride_lse": scheduling["seqlen_q"],
        **units(call),
        **window_numbers(call),
        **head_strides(t, absent=0),
        "num_heads": t.q.shape[1],
        "group": query_group(call),
        "num_splits": config.splits if config.splits > 1 else None,
        "CONFIG": config.compiled,
        "num_warps": 4,
        **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
    }
