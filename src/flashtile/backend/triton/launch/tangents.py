"""The launch of a forward pass with tangents."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Needs, lse_shape, new_rows, row_stats_shape, split_row_stats
from ....call.plan import Plan
from ...gpu.block_lists import block_lists
from ...gpu.captured import captured_pointers, captured_scalars
from ...gpu.kernel import Kernel
from ...gpu.pairs import ALIGN, pair_align, pair_scalars, pair_strides, with_contiguous_keys
from ...gpu.replay import Recorder
from ...replays import Results, with_inputs
from ...scalars import lse_strides, rows_last, splits_of, strides
from ..constants import TangentConstants
from ..tile_config import KernelConfig
from . import KERNELS
from . import arguments as args
from .formulas import launch
from .gradients import residual_of
from .semaphores import new_semaphores

TANGENTS, TANGENTS_MMA = (Kernel(f"{KERNELS}.{name}", "tangents_kernel") for name in ("tangents", "mma.tangents"))
PARTIALS = ("partial_out", "partial_dout", "partial_lse", "partial_dlse", "partial_residual", "semaphores")


def launch_tangents(recorder: Recorder, plan: Plan, call: Call, moves: Needs) -> Results:
    """Record the pass; the recorder's inputs are the call's, then the tangents of inputs that move. Returns `out`,
    `lse`, `dout` and `dlse`.
    """
    call, tangents = with_inputs(call, moves, recorder.inputs)
    call = with_contiguous_keys(recorder, call)
    t, config = call.tensors, plan.tile.tangents
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    dq, dk, dv, dbias = (None if x is None else recorder.op(rows_last, x) for x in tangents[:4])
    row_stats = args.new_result(recorder, call, q.new_empty(row_stats_shape(call), dtype=torch.float32), -torch.inf)
    lse = split_row_stats(q, row_stats)[0]
    dlse = args.new_result(recorder, call, q.new_empty(lse_shape(q), dtype=torch.float32), 0)
    out, dout = (args.new_result(recorder, call, new_rows(t.q, q.shape[1], v.shape[-1], q.dtype), 0) for _ in range(2))
    rows = [x for x in (q, k, v, out, dout, dq, dk, dv) if x is not None]
    if config.mma and (call.settings.requested_splits is not None or not all(map(args.is_aligned, rows))):
        config = plan.tile.given_splits
        assert config is not None
    align = args.alignment(rows)
    tiles = args.num_tiles(call, config.block_m)
    programs, splits = tiles * q.shape[1] * args.dense_batch(q), splits_of(call, plan.num_splits, config.block_n)
    lists, list_strides = block_lists(recorder, call, config.block_m, config.block_n, None) if splits == 1 else ({}, {})
    partials: dict[str, Tensor | None] = {} if config.mma else dict.fromkeys(PARTIALS)
    turns = {"heads_at_once": args.heads_at_once(call, q.shape[1] * args.dense_batch(q))} if config.mma else {}
    if splits > 1:  # with the rows of lse: [splits, B, H, S, Dv] or [splits, H, T, Dv]
        stats = ["partial_lse", "partial_dlse", *["partial_residual"] * call.keeps_residual]
        layouts = dict.fromkeys(stats, ((splits, *lse.shape), torch.float32))
        wide = ((splits, *lse.shape, v.shape[-1]), torch.float32)
        partials |= recorder.workspace(row_stats, {"partial_out": wide, "partial_dout": wide} | layouts)
        partials["semaphores"] = recorder.op(partial(new_semaphores, q.device, programs))
    captured = [x for x in tangents.score_mod_tensors if x is not None]
    every = (*t.score_mod_tensors, *captured)
    results = {
        "out": out, "lse": row_stats, "dout": dout, "dlse": dlse,
        "residual": recorder.op(residual_of, row_stats) if call.keeps_residual else None,
    }  # fmt: skip
    moving: dict[str, Tensor | None] = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsinks": tangents.sinks}
    moving["dslopes"] = None if tangents.alibi_slopes is None else recorder.contiguous(tangents.alibi_slopes)
    paged = t.page_table is not None
    launch(
        recorder,
        call,
        TANGENTS_MMA if config.mma else TANGENTS,
        args.pointers(recorder, call, q, k, v)
        | results
        | partials
        | moving
        | {"sinks": t.sinks}
        | lists
        | captured_pointers(every),
        programs * splits,
        {
            **args.shared_scalars(call, q, k, v, align),
            **captured_scalars(every),
            **pair_units(call, dbias),
            **(strides("dq", dq, align) if dq is not None else absent("dq", "bhm")),
            **(strides("dk", dk, align, keys=True, paged=paged) if dk is not None else absent("dk", "bhn")),
            **(strides("dv", dv, align, keys=True, paged=paged) if dv is not None else absent("dv", "bhn")),
            **strides("out", out, align),
            **strides("dout", dout, align),
            **list_strides,
            **lse_strides(lse),
            "stride_dslopes_b": None if (x := tangents.alibi_slopes) is None else x.shape[1] if x.dim() == 2 else 0,
            **constants(call, config, align, moves, splits),
            **({} if config.mma else {"stride_partials_split": None if splits == 1 else lse.numel()}),
            **turns,
            "num_tiles": tiles,
        },
        tangents=captured,
        partial=True,
        along=tuple(n for n, x in enumerate(tangents.score_mod_tensors) if x is not None),
    )
    return out, row_stats, dout, dlse


def absent(name: str, dimensions: str) -> dict[str, None]:
    return dict.fromkeys(f"stride_{name}_{dim}" for dim in dimensions)


def pair_units(call: Call, dbias: Tensor | None) -> dict[str, Any]:
    """The strides of bias, its tangent and mask, in the unit of all of them."""
    t = call.tensors
    units = [pair_align(t)] + ([] if dbias is None else [pair_align(t._replace(bias=dbias))])
    unit = ALIGN if min(units) == ALIGN else 1
    return {**pair_scalars(t, unit), **pair_strides("dbias", dbias, unit)}


def constants(call: Call, config: KernelConfig, align: int, moves: Needs, splits: int = 1) -> dict[str, Any]:
    """As `arguments.constants`, and what moves."""
    found = args.constants(call, config, align, splits=splits)
    compiled = TangentConstants(
        **vars(found["CONFIG"]),
        PRODUCTS_MOVE=moves.q or moves.k,
        SCORES_MOVE=moves.changes_scores,
        CAPTURED_MOVE=any(moves.score_mod_tensors),
    )
    return found | {"CONFIG": compiled}
