"""The launches of a forward pass."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Tensors, new_rows, row_stats_shape, split_row_stats
from ....call.plan import Plan
from ...gpu.block_lists import block_lists, summary
from ...gpu.kernel import Kernel
from ...gpu.pairs import with_aligned_bias, with_contiguous_keys
from ...gpu.replay import Recorder
from ...replays import Results
from ...scalars import lse_strides, rows_last, splits_of, strides
from ..constants import MOST_MMA, TRANSPOSED_ROWS
from . import KERNELS, eight_bit, products
from . import arguments as args
from .called import called_tile
from .formulas import launch
from .gradients import residual_of
from .semaphores import new_semaphores

FORWARD, FORWARD_MMA = (Kernel(f"{KERNELS}.{name}", "forward_kernel") for name in ("forward", "mma.forward"))
DECODE = Kernel(f"{KERNELS}.decode", "decode_kernel")
LATENT = Kernel(f"{KERNELS}.latent", "latent_kernel")
WIDE_MMA = Kernel(f"{KERNELS}.mma.wide_forward", "wide_forward_kernel")
ALIGNED_FROM = 64  # rows and keys above which copying a bias with unaligned rows pays


def launch_forward(recorder: Recorder, plan: Plan, call: Call) -> Results:
    call = call._replace(tensors=Tensors.from_flat(recorder.inputs))
    if plan.tile.products is not None:
        return products.launch_forward(recorder, call)
    return launch_attention(recorder, plan, call)


def launch_attention(recorder: Recorder, plan: Plan, call: Call, *, in_order: bool = False) -> Results:
    """Record the forward pass of a call whose tensors belong to the recorder; returns `out`, `lse` and, with lists of a
    mask tensor, the states of its blocks. `in_order`: each sequence's page has its number.
    """
    in_order = in_order or call.layout == "dense"
    call = eight_bit.with_numbers(recorder, call)
    call = with_aligned_bias(recorder, with_contiguous_keys(recorder, call), ALIGNED_FROM)
    t = call.tensors
    q, k, v = (recorder.op(rows_last, x) for x in t[:3])
    row_stats = args.new_result(recorder, call, q.new_empty(row_stats_shape(call), dtype=torch.float32), -torch.inf)
    lse = split_row_stats(q, row_stats)[0]
    out = t.out
    if out is None:
        out = args.new_result(recorder, call, new_rows(t.q, q.shape[1], v.shape[-1], call.out_dtype), 0)
    config, pack_gqa, part_keys = called_tile(plan.tile, call).forward, plan.tile.pack_gqa, plan.tile.part_keys
    if config.mma and not all(args.is_aligned(x) for x in (q, k, v, out)):
        assert plan.tile.given_splits is not None
        config = plan.tile.given_splits
    kernel = DECODE if part_keys else LATENT if args.reads_words(call) else FORWARD
    if config.mma:
        kernel = WIDE_MMA if max(q.shape[-1], v.shape[-1]) > MOST_MMA else FORWARD_MMA
    splits = splits_of(call, plan.num_splits, config.block_n)
    align, key_align = args.alignment([q, k, v, out]), None
    if k.dtype.itemsize == 1:
        align, key_align = args.alignment([q, out]), args.alignment([k, v])
    tiles = args.num_tiles(call, config.block_m, pack_gqa)
    programs = tiles * (q.shape[1] // pack_gqa) * args.dense_batch(q)
    partials: dict[str, Tensor | None] = {}
    stride_split: dict[str, Any] = {}
    if not config.mma:
        partials = dict.fromkeys(("partial_out", "partial_lse", "partial_residual", "semaphores"))
        partials |= eight_bit.scale_pointers(t) | ({} if kernel is LATENT else {"q_descale": t.q_descale})
        stride_split = {"stride_partials_split": None if splits == 1 or part_keys else lse.numel()}
    turns = {"heads_at_once": args.heads_at_once(call, q.shape[1] * args.dense_batch(q))} if config.mma else {}
    dealt = args.part_scalars(call, part_keys, splits) if part_keys else {}
    if plan.tile.part_registers is not None:
        dealt |= {"maxnreg": plan.tile.part_registers}
    if splits > 1 or part_keys:
        # Partial results have the rows of lse: [splits, B, H, S, Dv] or [splits, H, T, Dv]; of parts [slots, H, Dv].
        rows = (args.num_slots(call, part_keys), q.shape[1]) if part_keys else (splits, *lse.shape)
        layouts = {"partial_out": ((*rows, v.shape[-1]), torch.float32), "partial_lse": (rows, torch.float32)}
        layouts |= {"partial_residual": (rows, torch.float32)} if call.keeps_residual else {}
        partials |= recorder.workspace(row_stats, layouts)
        partials["semaphores"] = recorder.op(partial(new_semaphores, q.device, programs))
    whole = not call.settings.batch_invariant and pack_gqa == 1 and splits == 1 and config.block_m > TRANSPOSED_ROWS
    sizes = config.block_m, config.block_n
    states = summary(recorder, call, *sizes) if whole else None
    lists, list_strides = block_lists(recorder, call, *sizes, states) if whole else ({}, {})
    residual = recorder.op(residual_of, row_stats) if call.keeps_residual else None
    results = {"out": out, "lse": row_stats, "residual": residual}
    launch(
        recorder,
        call,
        kernel,
        args.pointers(recorder, call, q, k, v) | partials | results | {"sinks": t.sinks} | lists,
        programs * splits,
        {
            **args.shared_scalars(call, q, k, v, align, key_align),
            **list_strides,
            **strides("out", out, align),
            **lse_strides(lse),
            **args.constants(
                call,
                config,
                align,
                pack_gqa,
                1 if part_keys else splits,
                key_align,
                IN_ORDER=in_order and t.page_table is not None,
                BATCH_INVARIANT=call.settings.batch_invariant,
                PART_KEYS=part_keys,
            ),
            **stride_split,
            **dealt,
            **turns,
            **({} if config.mma else eight_bit.scale_strides(eight_bit.descales(t))),
            **({} if kernel in (FORWARD_MMA, WIDE_MMA, LATENT) else eight_bit.row_scale_strides(call)),
            "num_tiles": tiles,
        },
    )
    return (out, row_stats) if states is None else (out, row_stats, states)
