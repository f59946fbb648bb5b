"""FlashAttention-2's backward pass in torch operations (Dao, "FlashAttention-2", 2023, algorithm 2).

The probabilities of a tile are recomputed from the scores and the log-sum-exp. As in forward, the outer loop is over
row blocks: dq of a row block is complete after its inner loop, dk and dv are accumulated in place.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs
from ..blockwise.score_gradients import FeatureGradients, scores_backward
from ..blockwise.scores import Scores
from ..blockwise.sums import TILES_PER_CARRY, Sum, chunked_matmul
from ..blockwise.tiles import Rows, Side, Slab, TileShape, fold_groups, num_heads_kv, slabs, unfold_groups
from ..epilogue import sink_weight
from .loop import row_blocks, tiles


class Saved(NamedTuple):
    """Results of forward and their gradients, in the shape of q's rows."""

    out: Tensor  # [..., Dv]
    lse: Tensor  # [..., 1]
    residual: Tensor | None  # [..., 1] of lse
    dout: Tensor | None  # [..., Dv]
    dlse: Tensor | None  # [..., 1]


class Totals(NamedTuple):
    """Gradients in the accumulation dtype; `None` for those not requested."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    features: FeatureGradients


def backward(call: Call, needs: Needs, shape: TileShape, dtype: torch.dtype, saved: Saved) -> Gradients:
    """The requested gradients, in the accumulation dtype and the shapes of the inputs."""
    q, k, v = call.tensors.q, call.tensors.k, call.tensors.v
    queries, keys = Side(call, keys=False), Side(call, keys=True)
    totals = Totals(
        queries.buffer(q, q.shape[1], q.shape[-1], dtype) if needs.q else None,
        keys.buffer(k, num_heads_kv(call), k.shape[-1], dtype) if needs.k else None,
        keys.buffer(v, num_heads_kv(call), v.shape[-1], dtype) if needs.v else None,
        FeatureGradients.zeros(call, needs, dtype),
    )
    for slab in slabs(call, queries, keys, shape):
        backward_slab(call, slab, shape, dtype, saved, totals)
    return totals.features.results()._replace(
        q=None if totals.dq is None else queries.result(totals.dq),
        k=None if totals.dk is None else keys.result(totals.dk),
        v=None if totals.dv is None else keys.result(totals.dv),
    )


def backward_slab(call: Call, slab: Slab, shape: TileShape, dtype: torch.dtype, saved: Saved, totals: Totals) -> None:
    tensors, settings, groups, features = call.tensors, call.settings, slab.num_groups, totals.features
    dq, dk, dv = slab.query_rows(totals.dq), slab.key_rows(totals.dk), slab.key_rows(totals.dv)
    out, lse, residual = slab.query_rows(saved.out), slab.query_rows(saved.lse), slab.query_rows(saved.residual)
    dout, dlse = slab.query_rows(saved.dout), slab.query_rows(saved.dlse)
    scores = Scores(call, slab, dtype)
    q, k, v = (
        slab.query_rows(tensors.q),
        slab.key_rows(tensors.k),
        slab.key_rows(tensors.v),
    )
    key_sums = [Sum(dx.x, TILES_PER_CARRY) for dx in (dk, dv) if dx is not None]
    for rows in row_blocks(slab, shape):
        q_i = fold_groups(q.load(rows).to(dtype) * settings.scale, groups)  # [B, Hkv, G * M, D]
        lse_i = lse.load(rows)  # [B, Hq, M, 1]
        residual_i = None if residual is None else residual.load(rows)  # [B, Hq, M, 1]
        dout_i, delta = dout_and_delta(rows, dout, out, lse_i, dlse, dtype)  # [B, Hq, M, Dv], [B, Hq, M, 1]
        if features.sinks is not None and scores.sinks is not None:
            part = (sink_weight(scores.sinks, lse_i, residual_i) * delta).sum(dim=(0, 2, 3))
            features.sinks.add(-part, lambda x: x[slab.heads_q])
        # exp(s - inf) is 0: rows that see no key have no probabilities, even if their scores are NaN or infinite
        lse_i = torch.where(lse_i == -torch.inf, torch.inf, lse_i)
        dout_i = fold_groups(dout_i, groups)  # [B, Hkv, G * M, Dv]
        dq_i = Sum(torch.zeros_like(q_i), TILES_PER_CARRY)
        for tile in tiles(slab, settings, scores, rows, shape):
            k_j, v_j = k.load(tile.keys).to(dtype), v.load(tile.keys).to(dtype)  # [B, Hkv, N, D], [B, Hkv, N, Dv]
            product = unfold_groups(q_i @ k_j.transpose(-1, -2), groups)  # [B, Hq, M, N]
            visible = scores.visible(tile, q.exists(rows), k.exists(tile.keys))
            if scores.score_mod is not None:  # by which 0 * inf would pass: what a row of -inf scores alone gives it
                some = lse_i < torch.inf
                visible = some if visible is None else visible & some
            p = scores.forward(product, tile, visible) - lse_i
            if residual_i is not None:
                p -= residual_i
            p.exp_()
            if visible is not None:
                p.masked_fill_(~visible, 0)
            dp = unfold_groups(dout_i @ v_j.transpose(-1, -2), groups)  # [B, Hq, M, N]
            keep = scores.keep(tile)
            if dv is not None:
                kept = p if keep is None else p * keep
                dv.add(tile.keys, chunked_matmul(fold_groups(kept, groups).transpose(-1, -2), dout_i))
            if keep is not None:
                dp = dp * keep
            ds = p * (dp - delta)
            if visible is not None:
                ds.masked_fill_(~visible, 0)  # where delta is NaN, p * (dp - delta) = 0 * NaN
            ds = scores_backward(scores, product, ds, visible, tile, slab, features)
            ds = fold_groups(ds, groups)  # [B, Hkv, G * M, N]
            if dk is not None:
                dk.add(tile.keys, chunked_matmul(ds.transpose(-1, -2), q_i))  # q_i includes the scale
            dq_i.add(chunked_matmul(ds, k_j))
        for total in key_sums:
            total.count_term()
        if dq is not None:
            dq.store(rows, unfold_groups(dq_i.result() * settings.scale, groups))
    for total in key_sums:
        total.result()


def dout_and_delta(
    rows: slice, dout: Rows | None, out: Rows, lse: Tensor, dlse: Rows | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`dout` and `delta = sum(dout * out) - dlse` of a row block; both are 0 for rows that see no key, so that a NaN in
    `dout` does not reach other gradients.
    """
    out_i = out.load(rows).to(dtype)  # [B, Hq, M, Dv]
    dout_i = torch.zeros_like(out_i) if dout is None else dout.load(rows).to(dtype)
    delta = (dout_i * out_i).sum(dim=-1, keepdim=True)  # [B, Hq, M, 1]
    if dlse is not None:
        delta = delta - dlse.load(rows).to(dtype)
    empty = lse == -torch.inf
    return torch.where(empty, 0, dout_i), torch.where(empty, 0, delta)
