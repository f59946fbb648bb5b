"""Both passes of wide heads: PyTorch's matrix products, and kernels for what lies between them
(`kernels.between_products`). Scores of a block of heads, rows and visible keys are in memory at a time
(`score_blocks`).

Products are of float32 in bfloat16 parts (`split_products`), or of the inputs as they are
(`unsplit_products`): 16-bit ones, and float32 where one TF32 product is allowed.
"""

from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....call.call import Call, Needs, lse_shape, new_rows, row_stats_shape, split_row_stats
from ....call.problem import power_of_two
from ...gpu.captured import captured_scalars
from ...gpu.kernel import Kernel
from ...gpu.pairs import with_contiguous_keys
from ...gpu.pointers import Pointers
from ...gpu.precision import allows_tf32
from ...gpu.replay import Recorder, Results
from ...scalars import keep_scale, lse_strides, rows_last, strides, threshold
from ..score_blocks import UNIT, Block, Sizes, blocks_of, round_up, sizes_of
from . import KERNELS, split_products, unsplit_products
from . import arguments as args
from .formulas import launch
from .gradients import residual_of
from .score_views import new_scores

if TYPE_CHECKING:  # forward loads no launch code of backward
    from .backward_launches import BackwardLaunches

SOFTMAX, GRADIENT, FOLD, STORE = (
    Kernel(f"{KERNELS}.between_products", f"{name}_kernel") for name in ("softmax", "gradient", "fold", "store")
)
NUM_WARPS = 8
ROWS_AT_ONCE = 8  # that are copied
LEAST_WIDTH, MOST_IN_REGISTERS = 2048, 8192  # scores of a row


def products(dtype: torch.dtype) -> ModuleType:
    """The products that are allowed now."""
    return split_products if dtype is torch.float32 and not allows_tf32() else unsplit_products


def launch_forward(recorder: Recorder, call: Call) -> Results:
    """`out` and `lse`."""
    call = with_contiguous_keys(recorder, call)
    t, heads = call.tensors, call.tensors.k.shape[1]
    by, dtype = products(t.q.dtype), t.q.dtype
    sizes = sizes_of(call, parts=by.PARTS)
    blocks = blocks_of(sizes)
    q, k, v = (by.prepared(recorder, folded(recorder, x, heads)) for x in t[:3])
    row_stats = recorder.new(t.q.new_empty(row_stats_shape(call), dtype=torch.float32))
    lse = split_row_stats(t.q, row_stats)[0]
    residual = recorder.op(residual_of, row_stats) if call.keeps_residual else None
    out = t.out
    if out is None:
        out = recorder.new(new_rows(t.q, t.q.shape[1], t.v.shape[-1], dtype))
    sums = RowSums(recorder, sizes, blocks, out)
    q_rows, k_rows, v_rows = by.left(recorder, q), by.right(recorder, k), by.summands(recorder, v, sizes.keys_at_once)
    s = recorder.new(new_scores(q, blocks))
    p = by.new_probabilities(recorder, s, blocks, dtype)
    shared = call_scalars(call, by.PARTS)
    pointers = without_rows(args.pointers(recorder, call, q, k, v))
    pointers |= {"sinks": t.sinks, "s": s, "p": p, "lse": row_stats, "residual": residual}
    for block in blocks:
        recorder.effect(partial(by.multiply_rows, block), s, q_rows, k_rows)
        scalars = {**shared, **block_scalars(sizes, block, by.PARTS), **lse_strides(lse)}
        launch(recorder, call, SOFTMAX, pointers, block.num_heads * block.num_rows, scalars)
        recorder.effect(partial(by.add_over_keys, sizes, block, 1.0, sums.whole), sums.memory, p, v_rows)
        sums.store(block)
    return out, row_stats


def launch_backward(
    launches: "BackwardLaunches", needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of q, k and v that are needed, and each row's part of its slope's gradient."""
    recorder, call = launches.recorder, launches.call
    t, heads, scale = call.tensors, call.tensors.k.shape[1], call.settings.scale
    by = products(t.q.dtype)
    sizes = sizes_of(call, parts=by.PARTS)
    blocks, row_chunk = blocks_of(sizes), sizes.row_chunk if by.PARTS else 1
    q, k, v, dout = (
        by.prepared(recorder, folded(recorder, x, heads)) for x in (launches.q, launches.k, launches.v, launches.dout)
    )
    q_rows, k_rows = by.left(recorder, q), by.right(recorder, k)
    # Gradients of values need none of scores, which are garbage without these products, and not read.
    of_scores = needs.q or needs.k or needs.alibi_slopes
    weights = (by.left(recorder, dout), by.right(recorder, v)) if of_scores else None
    s, dp = (recorder.new(new_scores(q, blocks)) for _ in range(2))
    p_t, ds_t, ds = by.new_weights(recorder, s, dp, sizes, blocks, t.q.dtype, needs)
    dq, dk, dv = (
        recorder.new(new_rows(x, x.shape[1], x.shape[-1], x.dtype)) if needed else None
        for x, needed in zip(t[:3], (needs.q, needs.k, needs.v), strict=True)
    )
    dslopes = recorder.new(t.q.new_empty(lse_shape(t.q), dtype=torch.float32)) if needs.alibi_slopes else None
    dq_sums = None if dq is None else RowSums(recorder, sizes, blocks, dq)
    dk_sums, dv_sums = (None if x is None else KeySums(recorder, sizes, x, zero=not blocks[0].empty) for x in (dk, dv))
    keys, rows = sizes.keys_at_once, sizes.row_chunk
    k_summands, q_summands, dout_summands = (
        by.summands(recorder, x, chunk) if needed else None
        for x, chunk, needed in ((k, keys, needs.q), (q, rows, needs.k), (dout, rows, needs.v))
    )
    pointers = without_rows(launches.pointers)
    pointers |= {"s": s, "dp": dp, "p_t": p_t, "ds_t": ds_t, "ds": ds, "dslopes": dslopes}
    shared = {
        **call_scalars(call, by.PARTS),
        **args.row_stats_strides(launches.row_stats),
        **args.row_strides("dslopes", dslopes),
        "ROW_CHUNK": row_chunk,
    }
    kept = keep_scale(threshold(call.settings.dropout_p)) if call.settings.dropout_p > 0 else 1.0
    for block in blocks:
        recorder.effect(partial(by.multiply_rows, block), s, q_rows, k_rows)
        if weights is not None:
            recorder.effect(partial(by.multiply_rows, block), dp, *weights)
        padded_rows = round_up(block.num_rows, row_chunk)
        scalars = {**shared, **block_scalars(sizes, block, by.PARTS), "padded_rows": padded_rows}
        launch(recorder, call, GRADIENT, pointers, block.num_heads * padded_rows, scalars, partial=True)
        if dv_sums is not None:
            recorder.effect(partial(by.add_over_rows, sizes, block, kept), dv_sums.memory, p_t, dout_summands)
        if dk_sums is not None:
            of_rows = ds if ds_t is None else ds_t
            recorder.effect(partial(by.add_over_rows, sizes, block, scale), dk_sums.memory, of_rows, q_summands)
        if dq_sums is not None:
            recorder.effect(
                partial(by.add_over_keys, sizes, block, scale, dq_sums.whole), dq_sums.memory, ds, k_summands
            )
            dq_sums.store(block)
    for sums in (dk_sums, dv_sums):
        if sums is not None:
            sums.store()
    return dq, dk, dv, dslopes


def grouped(x: Tensor, heads: int) -> Tensor:
    """A view `[B, heads, S, group, D]` of `[B, heads * group, S, D]`."""
    return x.unflatten(1, (heads, -1)).transpose(2, 3)


def folded(recorder: Recorder, x: Tensor, heads: int) -> Tensor:
    """`[B, heads * group, S, D]` as `[B, heads, S * group, D]`: the rows of a key head, a view where memory allows."""
    batch, heads_q, seqlen, width = x.shape
    group = heads_q // heads
    if group == 1:
        return x
    if grouped(x, heads).is_contiguous():
        return recorder.op(partial(as_rows, heads), x)
    x = recorder.op(rows_last, x)
    operand = recorder.new(x.new_empty((batch, heads, seqlen * group, width)))
    scalars = {"num_rows": seqlen * group, **copy_scalars(x, group)}
    recorder.launch(FOLD, {"rows": x, "operand": operand}, num_copies(seqlen * group) * batch * heads, scalars)
    return operand


def as_rows(heads: int, x: Tensor) -> Tensor:
    """A view `[B, heads, S * group, D]`."""
    return grouped(x, heads).flatten(2, 3)


class RowSums:
    """Memory in which the rows of a block are summed, and how they reach `result [B, H, S, D]`: it is the result's own
    if that is float32 and the rows of a key head follow each other there.
    """

    def __init__(self, recorder: Recorder, sizes: Sizes, blocks: tuple[Block, ...], result: Tensor):
        self.recorder, self.sizes, self.result = recorder, sizes, result
        heads = sizes.heads // result.shape[0]
        self.whole = result.dtype is torch.float32 and grouped(result, heads).is_contiguous()
        if self.whole:
            self.memory = recorder.op(partial(rows_of_heads, heads), result)
        else:
            shape = most_rows(blocks), result.shape[-1]
            self.memory = recorder.new(result.new_empty(shape, dtype=torch.float32))

    def store(self, block: Block) -> None:
        if not self.whole:
            rows = block.head, block.num_heads, block.row, block.num_rows
            store(self.recorder, self.memory, self.result, rows, self.sizes.group)


class KeySums:
    """Memory in which rows of keys or values are summed over blocks, `[heads, keys, D]`."""

    def __init__(self, recorder: Recorder, sizes: Sizes, result: Tensor, *, zero: bool):
        self.recorder, self.result = recorder, result
        self.whole = result.dtype is torch.float32 and result.is_contiguous()
        self.rows = 0, sizes.heads, 0, sizes.keys
        if self.whole:
            self.memory = recorder.op(partial(rows_of_heads, result.shape[1]), result)
        else:
            shape = sizes.heads, sizes.keys, result.shape[-1]
            self.memory = recorder.new(result.new_empty(shape, dtype=torch.float32))
        if zero:
            recorder.effect(Tensor.zero_, self.memory)

    def store(self) -> None:
        if not self.whole:
            store(self.recorder, self.memory, self.result, self.rows, 1)


def rows_of_heads(heads: int, x: Tensor) -> Tensor:
    """A view `[B * heads, S * group, D]`."""
    return as_rows(heads, x).flatten(0, 1)


def most_rows(blocks: tuple[Block, ...]) -> int:
    return max(block.num_heads * block.num_rows for block in blocks)


def store(recorder: Recorder, sums: Tensor, result: Tensor, at: tuple[int, int, int, int], group: int) -> None:
    """Store sums in a result. They begin at a key head, have some heads, begin at a row and have some rows."""
    head, num_heads, row, num_rows = at
    scalars = {"first_head": head, "first_row": row, "num_rows": num_rows, **copy_scalars(result, group)}
    pointers = {"sums": sums, "rows": result}
    recorder.launch(STORE, pointers, num_copies(num_rows) * num_heads, scalars)


def copy_scalars(x: Tensor, group: int) -> dict[str, Any]:
    """Scalars of both kernels that copy rows of `x [B, H, S, D]`."""
    align, width = args.alignment([x]), x.shape[-1]
    return {
        **strides("rows", x, align),
        "num_heads": x.shape[1] // group,
        "group": group,
        "WIDTH": power_of_two(width),
        "D": width,
        "ALIGN": align,
        "BLOCK_M": ROWS_AT_ONCE,
        "num_warps": 4,
    }


def num_copies(rows: int) -> int:
    """Programs that copy the rows of a head."""
    return -(-rows // ROWS_AT_ONCE)


def without_rows(pointers: Pointers) -> dict[str, Any]:
    """The pointers of features and statistics."""
    return {name: x for name, x in pointers.items() if name not in ("q", "k", "v", "dout")}


def call_scalars(call: Call, parts: bool) -> dict[str, Any]:
    """Scalars of both kernels between products that follow from the call."""
    return {
        **args.feature_scalars(call),
        **captured_scalars(call.tensors.score_mod_tensors),
        **args.seqlen_scalars(call),
        "num_heads_q": call.tensors.q.shape[1],
        "num_heads_k": args.num_heads_k(call),
        "num_tiles": None,
        "PARTS": parts,
        "ACCURATE": call.tensors.q.dtype is torch.float32,
        "num_warps": NUM_WARPS,
    }


def block_scalars(sizes: Sizes, block: Block, parts: bool) -> dict[str, Any]:
    """Those that follow from the block."""
    stored = block.padded_keys if parts else block.pitch
    width = min(max(power_of_two(stored), LEAST_WIDTH), MOST_IN_REGISTERS)
    return {
        "first_head": block.head,
        "first_row": block.row,
        "num_rows": block.num_rows,
        "first_key": block.key // UNIT,
        "pitch": block.pitch // UNIT,
        "padded_keys": block.padded_keys // UNIT,
        "CHUNK": sizes.keys_at_once,
        "WIDTH": width,
        "NUM_BLOCKS": -(-stored // width),
    }
