"""FlashAttention-2's backward pass in torch operations (Dao, "FlashAttention-2", 2023, algorithm 2).

The probabilities of a tile are recomputed from the scores and the log-sum-exp. The loops run as in forward, row
blocks outside: dq of a row block is finished when its keys have passed, dk and dv are added up in place.
"""

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs
from ..common.score_gradients import FeatureGradients, scores_backward
from ..common.scores import Scores
from ..common.tiles import Rows, Side, Slab, TileShape, fold_groups, slabs, unfold_groups
from .loop import row_blocks, tiles


def backward(
    call: Call,
    needs: Needs,
    shape: TileShape,
    dtype: torch.dtype,
    dout: Tensor | None,  # as q, with Dv
    out: Tensor,
    lse: Tensor,  # [..., 1]
    dlse: Tensor | None,  # [..., 1]
) -> Gradients:
    """Gradients in the accumulation dtype and the callers' shapes."""
    tensors = call.tensors
    queries, keys = Side(call, keys=False), Side(call, keys=True)
    heads_kv = tensors.k.shape[1 if call.layout == "dense" else -2]
    dq = queries.buffer(tensors.q, tensors.q.shape[1], tensors.q.shape[-1], dtype) if needs.q else None
    dk = keys.buffer(tensors.k, heads_kv, tensors.k.shape[-1], dtype) if needs.k else None
    dv = keys.buffer(tensors.v, heads_kv, tensors.v.shape[-1], dtype) if needs.v else None
    features = FeatureGradients(call, needs, dtype)
    for slab in slabs(call, queries, keys, shape):
        given = [None if x is None else slab.query_rows(x) for x in (dout, out, lse, dlse)]
        wanted = [None if dq is None else slab.query_rows(dq)]
        wanted += [None if x is None else slab.key_rows(x) for x in (dk, dv)]
        backward_slab(call, slab, shape, dtype, *given, *wanted, features)
    return Gradients(
        *(None if x is None else side.finished(x) for side, x in ((queries, dq), (keys, dk), (keys, dv))),
        features.bias,
        features.alibi_slopes,
        features.sinks,
        tuple(features.score_mod_tensors),
    )


def backward_slab(
    call: Call,
    slab: Slab,
    shape: TileShape,
    dtype: torch.dtype,
    dout: Rows | None,
    out: Rows,
    lse: Rows,
    dlse: Rows | None,
    dq: Rows | None,
    dk: Rows | None,
    dv: Rows | None,
    features: FeatureGradients,
) -> None:
    tensors, settings, groups = call.tensors, call.settings, slab.num_groups
    scores = Scores(call, slab, dtype)
    q, k, v = slab.query_rows(tensors.q), slab.key_rows(slab.keys.flat(tensors.k)), slab.key_rows(slab.keys.flat(tensors.v))
    for rows in row_blocks(slab, shape):
        q_i = fold_groups(q.load(rows).to(dtype) * settings.scale, groups)  # [B, Hkv, G * M, D]
        lse_i = lse.load(rows)  # [B, Hq, M, 1]
        dout_i, delta = row_terms(rows, dout, out, lse_i, dlse, dtype)  # [B, Hq, M, Dv], [B, Hq, M, 1]
        if features.sinks is not None:
            p_sink = torch.where(lse_i == -torch.inf, 0, torch.exp(scores.sinks - lse_i))
            features.sinks[slab.heads_q] -= (p_sink * delta).sum(dim=(0, 2, 3))
        # exp(s - inf) is 0: a row that has seen nothing has no probabilities, whatever its scores are
        lse_i = torch.where(lse_i == -torch.inf, torch.inf, lse_i)
        dout_i = fold_groups(dout_i, groups)  # [B, Hkv, G * M, Dv]
        dq_i = torch.zeros_like(q_i)
        for tile in tiles(slab, settings, scores, rows, shape):
            k_j, v_j = k.load(tile.keys).to(dtype), v.load(tile.keys).to(dtype)  # [B, Hkv, N, D], [B, Hkv, N, Dv]
            product = unfold_groups(q_i @ k_j.transpose(-1, -2), groups)  # [B, Hq, M, N]
            p = torch.exp(scores.forward(product, tile) - lse_i)
            visible = scores.visible(tile, q.exists(rows), k.exists(tile.keys))
            if visible is not None:
                p = torch.where(visible, p, 0)
            dp = unfold_groups(dout_i @ v_j.transpose(-1, -2), groups)  # [B, Hq, M, N]
            keep = scores.keep(tile)
            if dv is not None:
                kept = p if keep is None else p * keep
                dv.add(tile.keys, fold_groups(kept, groups).transpose(-1, -2) @ dout_i)
            if keep is not None:
                dp = dp * keep
            ds = p * (dp - delta)
            ds = scores_backward(scores, product, ds, visible, tile, slab, features)
            ds = fold_groups(ds, groups)  # [B, Hkv, G * M, N]
            if dk is not None:
                dk.add(tile.keys, ds.transpose(-1, -2) @ q_i)  # q_i carries the scale
            dq_i += ds @ k_j
        if dq is not None:
            dq.store(rows, unfold_groups(dq_i * settings.scale, groups))


def row_terms(
    rows: slice, dout: Rows | None, out: Rows, lse: Tensor, dlse: Rows | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`dout` and `delta = sum(dout * out) - dlse` of a row block. Rows without keys pass no gradient through their
    scores, whatever arrives there; `dlse` still reaches their sink.
    """
    out_i = out.load(rows).to(dtype)  # [B, Hq, M, Dv]
    dout_i = torch.zeros_like(out_i) if dout is None else dout.load(rows).to(dtype)
    delta = (dout_i * out_i).sum(dim=-1, keepdim=True)  # [B, Hq, M, 1]
    if dlse is not None:
        delta = delta - dlse.load(rows).to(dtype)
    empty = lse == -torch.inf
    return torch.where(empty, 0, dout_i), torch.where(empty, 0, delta)
