"""Attention as in the contract: each slab is one tile, and torch.autograd computes the gradients."""

from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, Tensors, differentiable_positions, public_lse
from ...call.eight_bit_layouts import dequantized
from ...call.plan import Plan
from ...call.problem import accumulation_dtype
from ...private_torch import recording_graph
from ..blockwise.eight_bit import key_and_value_rows
from ..blockwise.lse_shape import row_stats_to_rows, rows_to_row_stats
from ..blockwise.scores import Scores, Tile, cast_floating
from ..blockwise.softmax import finite_or_zero, lse_residual
from ..blockwise.sums import chunked_matmul
from ..blockwise.tiles import Rows, Side, Slab, fold_groups, slabs, unfold_groups


class Matmul(torch.autograd.Function):
    """`a @ b`. The products of its derivative have long inner dimensions too."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return chunked_matmul(a, b)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        da = chunked_matmul(dx, b.mT) if ctx.needs_input_grad[0] else None
        db = chunked_matmul(a.mT, dx) if ctx.needs_input_grad[1] else None
        return da, db


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    call = dequantized(call)
    t = call.tensors
    dtype = accumulation_dtype(t.q.dtype)
    queries, keys = Side(call, keys=False), Side(call, keys=True)
    out = queries.buffer(t.q, t.q.shape[1], t.v.shape[-1], dtype)  # [B, Hq, Sq, Dv] or [T + 1, Hq, Dv]
    lse = queries.buffer(t.q, t.q.shape[1], 1, dtype, fill=-torch.inf)
    residual = queries.buffer(t.q, t.q.shape[1], 1, dtype)
    for slab in slabs(call, queries, keys, plan.tile):
        if slab.seqlen_q > 0:
            forward_slab(call, slab, *(slab.query_rows(x) for x in (out, lse, residual)))
    row_stats = rows_to_row_stats(call, queries.result(lse), queries.result(residual))
    return queries.result(out).to(call.out_dtype), row_stats


def forward_slab(call: Call, slab: Slab, out: Rows, lse: Rows, residual: Rows) -> None:
    """Softmax attention of a slab, by its formula."""
    t, settings, groups = call.tensors, call.settings, slab.num_groups
    dtype = accumulation_dtype(t.q.dtype)
    scores = Scores(call, slab, dtype)
    tile = Tile(slice(0, slab.seqlen_q), slice(0, slab.seqlen_k), full=False)
    q_rows, (k_rows, v_rows) = slab.query_rows(t.q), key_and_value_rows(call, slab, dtype)
    q = fold_groups(q_rows.load(tile.rows).to(dtype), groups)  # [B, Hkv, G * Sq, D]
    k, v = k_rows.load(tile.keys), v_rows.load(tile.keys)  # [B, Hkv, Sk, D], [B, Hkv, Sk, Dv]
    s = unfold_groups(matmul(q, k.mT) * settings.scale, groups)  # [B, Hq, Sq, Sk]
    visible = scores.visible(tile, q_rows.exists(tile.rows), k_rows.exists(tile.keys))
    product, s = s, hidden_scores(scores, s, tile, visible)
    if scores.score_mod is not None and torch.is_grad_enabled():
        some = (s > -torch.inf).any(dim=-1, keepdim=True)  # what -inf gives the others' derivatives is 0 * inf
        s = hidden_scores(scores, product, tile, some if visible is None else visible & some)
    sinks = scores.sinks  # [H, 1, 1]
    if sinks is not None:  # a key without a value
        all_weight = sinks == torch.inf  # exp(inf - inf) has NaN derivatives: make it the only key, with score 0
        s = torch.where(all_weight & (s < torch.inf), -torch.inf, s)
        s = torch.cat((s, torch.where(all_weight, 0, sinks).expand(*s.shape[:-1], 1)), dim=-1)  # [B, Hq, Sq, Sk + 1]
    if s.shape[-1] == 0:
        return
    m = finite_or_zero(s.detach().amax(dim=-1, keepdim=True))  # [B, Hq, Sq, 1]
    total = torch.exp(s - m).sum(dim=-1, keepdim=True)
    empty = total == 0  # kept out of log and division, whose derivatives would be NaN
    row_lse = torch.where(empty, -torch.inf, m + torch.log(torch.where(empty, 1, total)))
    row_lse = torch.where(m == torch.inf, m, row_lse)
    row_residual = lse_residual(m, total.detach(), row_lse.detach())
    log_total = torch.where(m == torch.inf, 0, torch.log(torch.where(empty, 1, total)))
    p = torch.exp((s - m) - log_total)[..., : slab.seqlen_k]
    if sinks is not None:
        row_lse = torch.where(all_weight & (row_lse == 0), sinks, row_lse)
    keep = scores.keep(tile)
    if keep is not None:
        p = p * keep
    lse.store(tile.rows, row_lse)
    residual.store(tile.rows, row_residual)
    out.store(tile.rows, unfold_groups(matmul(fold_groups(p, groups), v), groups))


def hidden_scores(scores: Scores, product: Tensor, tile: Tile, visible: Tensor | None) -> Tensor:
    """The final scores of a tile, -inf where pairs are hidden."""
    s = scores.forward(product, tile, visible)
    return s if visible is None else torch.where(visible, s, -torch.inf)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return Matmul.apply(a, b)  # type: ignore[return-value]


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """Run forward again on leaves in the accumulation dtype, and differentiate it by torch.autograd."""
    dtype = accumulation_dtype(call.tensors.q.dtype)
    inputs = call.tensors.flat()
    flat = [cast_floating(x, dtype) if n < 3 and x is not None else x for n, x in enumerate(inputs)]  # q, k, v
    positions = differentiable_positions(len(inputs))
    leaves: dict[int, Tensor] = {}
    for n, needed in zip(positions, needs.flat(), strict=True):
        x = inputs[n]
        if needed and x is not None:
            flat[n] = leaves[n] = cast_floating(x, dtype).detach().requires_grad_()
    if dout is not None:  # a NaN of a row that sees no key must not spread by 0 * NaN
        dout = torch.where(row_stats_to_rows(call, lse)[0] == -torch.inf, 0, dout)
    with recording_graph():
        results = public_lse(call, forward(plan, call._replace(tensors=Tensors.from_flat(flat))))
    # Leave out results without a cotangent, and those that depend on no leaf because there are no keys.
    pairs = [
        (x, dx.to(dtype)) for x, dx in zip(results, (dout, dlse), strict=True) if dx is not None and x.requires_grad
    ]
    grads = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if pairs and leaves:
        outputs, cotangents = zip(*pairs, strict=True)
        grads = torch.autograd.grad(
            outputs, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True
        )
    gradients = dict(zip(leaves, grads, strict=True))
    return Gradients.from_flat([gradients.get(n) for n in positions])
