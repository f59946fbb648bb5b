"""Both passes of wide heads: PyTorch's matrix products, and kernels for what lies between them
(`kernels.between_products`). Scores of a block of heads and rows are in memory at a time (`score_blocks`).

Products are those of float32 in bfloat16 parts (`host_parts`), or of the inputs as they are (`host_unsplit`): 16-bit
ones, and float32 where one TF32 product is allowed.
"""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, lse_shape, new_rows
from ...call.problem import power_of_two
from ..gpu.kernel import Kernel
from ..gpu.precision import allows_tf32
from ..gpu.replay import Recorder, Results
from ..scalars import LOG2E
from . import host_parts, host_unsplit
from .launches import BackwardLaunches
from .score_blocks import UNIT, Block, Sizes, chunk_of, new_scores, round_up, sizes_of

SOFTMAX, GRADIENT = (
    Kernel(f"{__package__}.kernels.between_products", f"{name}_kernel") for name in ("softmax", "gradient")
)
NUM_WARPS = 8
MOST_IN_REGISTERS = 8192  # scores of a row


def products(dtype: torch.dtype) -> ModuleType:
    """The products that are allowed now."""
    return host_parts if dtype is torch.float32 and not allows_tf32() else host_unsplit


def launch_forward(recorder: Recorder, call: Call) -> Results:
    """`out` and `lse`."""
    t, sizes = call.tensors, sizes_of(call)
    by, dtype = products(t.q.dtype), t.q.dtype
    q, k, v = (by.prepared(recorder, x) for x in t[:3])
    lse = recorder.new(q.new_empty(lse_shape(t.q), dtype=torch.float32))
    # Probabilities of 16 bits are at most 1 and divided by their sum at the end, so that none are subnormal numbers.
    divisors = None if dtype is torch.float32 else recorder.new(torch.empty_like(lse))
    out, sums = new_sums(recorder, t.q, t.q.shape[1], t.v.shape[-1], t.out)
    q_rows, k_rows, v_rows = by.left(recorder, q), by.right(recorder, k), by.summands(recorder, v)
    s = recorder.new(new_scores(q, sizes))
    p = by.new_probabilities(recorder, s, sizes, dtype)
    for block in sizes.blocks():
        recorder.effect(partial(by.multiply_rows, sizes, block), s, q_rows, k_rows)
        scalars = {
            **block_scalars(call, sizes, block, parts=by.PARTS),
            "first": block.head * sizes.rows + block.row,
            "stride_lse": sizes.rows,
        }
        pointers = {"s": s, "p": p, "lse": lse, "divisors": divisors}
        recorder.launch(SOFTMAX, pointers, block.num_heads * block.num_rows, scalars)
        recorder.effect(partial(by.add_over_keys, sizes, block, 1.0), sums, p, v_rows)
    if divisors is None:
        stored(recorder, out, sums)
    else:
        recorder.effect(divide, out, sums, divisors)
    return out, lse


def launch_backward(
    launches: BackwardLaunches, needs: Needs, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Gradients:
    """The gradients of q, k and v that are needed."""
    recorder, call = launches.recorder, launches.call
    sizes, scale, t = sizes_of(call), call.settings.scale, call.tensors
    by = products(t.q.dtype)
    q, k, v, dout = (by.prepared(recorder, x) for x in (launches.q, launches.k, launches.v, launches.dout))
    launches.preprocess(out, lse, dlse)
    stats_rows, row_chunk = launches.row_stats.shape[-2], by.row_chunk(sizes)
    q_rows, dout_rows = (by.left(recorder, x) for x in (q, dout))
    k_rows, v_rows = (by.right(recorder, x) for x in (k, v))
    s, dp = (recorder.new(new_scores(q, sizes)) for _ in range(2))
    p_t, ds_t, ds = by.new_weights(recorder, s, dp, sizes, t.q.dtype, needs)
    (dq, dq_sums), (dk, dk_sums), (dv, dv_sums) = (
        new_sums(recorder, x, x.shape[1], x.shape[-1]) if needed else (None, None)
        for x, needed in zip((t.q, t.k, t.v), (needs.q, needs.k, needs.v), strict=True)
    )
    k_summands, q_summands, dout_summands = (
        by.summands(recorder, x) if needed else None for x, needed in ((k, needs.q), (q, needs.k), (dout, needs.v))
    )
    for block in sizes.blocks():
        recorder.effect(partial(by.multiply_rows, sizes, block), s, q_rows, k_rows)
        recorder.effect(partial(by.multiply_rows, sizes, block), dp, dout_rows, v_rows)
        padded_rows = round_up(block.num_rows, row_chunk)
        scalars = {
            **block_scalars(call, sizes, block, parts=by.PARTS),
            "padded_rows": padded_rows,
            "ROW_CHUNK": row_chunk,
            "first": block.head * stats_rows + block.row,
            "stride_row_stats": stats_rows,
        }
        pointers = {"s": s, "dp": dp, "p_t": p_t, "ds_t": ds_t, "ds": ds, "row_stats": launches.pointers["row_stats"]}
        recorder.launch(GRADIENT, pointers, block.num_heads * padded_rows, scalars)
        if dv_sums is not None:
            recorder.effect(partial(by.add_over_rows, sizes, block, 1.0), dv_sums, p_t, dout_summands)
        if dk_sums is not None:
            of_rows = ds if ds_t is None else ds_t
            recorder.effect(partial(by.add_over_rows, sizes, block, scale), dk_sums, of_rows, q_summands)
        if dq_sums is not None:
            recorder.effect(partial(by.add_over_keys, sizes, block, scale), dq_sums, ds, k_summands)
    for x, sums in ((dq, dq_sums), (dk, dk_sums), (dv, dv_sums)):
        if x is not None:
            stored(recorder, x, sums)
    return Gradients(q=dq, k=dk, v=dv)


def new_sums(
    recorder: Recorder, like: Tensor, heads: int, width: int, result: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """A result with the rows of `like`, unless it is given, and the memory in which it is summed: the same one, if that
    is float32 and heads follow each other there.
    """
    if result is None:
        result = recorder.new(new_rows(like, heads, width, like.dtype))
    if result.dtype is torch.float32 and result.is_contiguous():
        return result, result
    return result, recorder.new(result.new_empty(result.shape, dtype=torch.float32))


def stored(recorder: Recorder, result: Tensor, sums: Tensor | None) -> None:
    if sums is not result:
        recorder.effect(Tensor.copy_, result, sums)


def divide(out: Tensor, sums: Tensor, divisors: Tensor) -> None:
    torch.div(sums, divisors[..., None], out=out)


def block_scalars(call: Call, sizes: Sizes, block: Block, *, parts: bool) -> dict[str, Any]:
    """Scalars of both kernels between products."""
    stored = sizes.padded_keys if parts else sizes.pitch
    return {
        "factor": call.settings.scale * LOG2E,
        "rows": block.num_rows,
        "keys": sizes.keys,
        "stride_s": sizes.pitch // UNIT,
        "padded_keys": sizes.padded_keys // UNIT,
        "CHUNK": chunk_of(sizes.keys),
        "WIDTH": min(power_of_two(stored), MOST_IN_REGISTERS),
        "NUM_BLOCKS": -(-stored // MOST_IN_REGISTERS),
        "PARTS": parts,
        "num_warps": NUM_WARPS,
    }
