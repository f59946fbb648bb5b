"""Both passes of float32 above 128 features where one TF32 product is allowed: PyTorch's, of the inputs as they are.

As `host_products`, without parts: probabilities and gradients of scores are stored over the scores that they are of.
"""

import math
from functools import partial

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, lse_shape
from ..gpu.replay import Recorder, Results
from .host_products import GRADIENT, SOFTMAX, Block, Sizes, block_scalars, new_scores, new_sums, sizes_of, stored
from .launches import BackwardLaunches


def launch_forward(recorder: Recorder, call: Call) -> Results:
    """`out` and `lse`."""
    q, k, v = (heads_of(recorder, x) for x in call.tensors[:3])
    t, sizes = call.tensors, sizes_of(call)
    lse = recorder.new(q.new_empty(lse_shape(t.q), dtype=torch.float32))
    out, sums = new_sums(recorder, t.q, t.q.shape[1], v.shape[-1], t.out)
    s = recorder.new(new_scores(q, sizes))
    for block in sizes.blocks():
        recorder.effect(partial(multiply_rows, sizes, block), s, q, k)
        scalars = {
            **block_scalars(call, sizes, block, parts=False),
            "first": block.head * sizes.rows + block.row,
            "stride_lse": sizes.rows,
        }
        recorder.launch(SOFTMAX, {"s": s, "p": s, "lse": lse}, block.num_heads * block.num_rows, scalars)
        recorder.effect(partial(add_over_keys, sizes, block, 1.0), sums, s, v)
    stored(recorder, out, sums)
    return out, lse


def launch_backward(
    launches: BackwardLaunches, needs: Needs, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Gradients:
    """The gradients of q, k and v that are needed."""
    recorder, call = launches.recorder, launches.call
    q, k, v, dout = (heads_of(recorder, x) for x in (launches.q, launches.k, launches.v, launches.dout))
    sizes, scale, t = sizes_of(call), call.settings.scale, call.tensors
    launches.preprocess(out, lse, dlse)
    stats_rows = launches.row_stats.shape[-2]
    s, dp = (recorder.new(new_scores(q, sizes)) for _ in range(2))
    (dq, dq_sums), (dk, dk_sums), (dv, dv_sums) = (
        new_sums(recorder, x, x.shape[1], x.shape[-1]) if needed else (None, None)
        for x, needed in zip((t.q, t.k, t.v), (needs.q, needs.k, needs.v), strict=True)
    )
    for block in sizes.blocks():
        recorder.effect(partial(multiply_rows, sizes, block), s, q, k)
        recorder.effect(partial(multiply_rows, sizes, block), dp, dout, v)
        scalars = {
            **block_scalars(call, sizes, block, parts=False),
            "padded_rows": block.num_rows,
            "ROW_CHUNK": 1,
            "first": block.head * stats_rows + block.row,
            "stride_row_stats": stats_rows,
        }
        pointers = {"s": s, "dp": dp, "p_t": s, "ds_t": None, "ds": dp, "row_stats": launches.pointers["row_stats"]}
        recorder.launch(GRADIENT, pointers, block.num_heads * block.num_rows, scalars)
        if dv_sums is not None:
            recorder.effect(partial(add_over_rows, sizes, block, 1.0), dv_sums, s, dout)
        if dk_sums is not None:
            recorder.effect(partial(add_over_rows, sizes, block, scale), dk_sums, dp, q)
        if dq_sums is not None:
            recorder.effect(partial(add_over_keys, sizes, block, scale), dq_sums, dp, k)
    for x, sums in ((dq, dq_sums), (dk, dk_sums), (dv, dv_sums)):
        if x is not None:
            stored(recorder, x, sums)
    return Gradients(q=dq, k=dk, v=dv)


def heads_of(recorder: Recorder, x: Tensor) -> Tensor:
    """`x [B, H, S, D]` as `[B * H, S, D]`, contiguous."""
    return recorder.op(flattened, recorder.op(Tensor.contiguous, x))


def flattened(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def scores_of(sizes: Sizes, block: Block, s: Tensor) -> Tensor:
    """The scores of a block, `[heads, rows, keys]`."""
    shape = block.num_heads, block.num_rows, sizes.pitch
    return s[: math.prod(shape)].view(shape)[..., : sizes.keys]


def multiply_rows(sizes: Sizes, block: Block, s: Tensor, x: Tensor, y: Tensor) -> None:
    """Store the inner products of rows in `s`."""
    torch.bmm(x[block.heads, block.rows], y[block.heads].mT, out=scores_of(sizes, block, s))


def add_over_keys(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Store `alpha * x @ y` for the rows of a block."""
    sums = sums.flatten(0, 1)[block.heads, block.rows]
    torch.baddbmm(sums, scores_of(sizes, block, x), y[block.heads], beta=0, alpha=alpha, out=sums)


def add_over_rows(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Add `alpha * x^T @ y` for the rows of a block to the sums, which hold nothing before the first rows."""
    sums, beta = sums.flatten(0, 1)[block.heads], float(block.row > 0)
    torch.baddbmm(sums, scores_of(sizes, block, x).mT, y[block.heads, block.rows], beta=beta, alpha=alpha, out=sums)
