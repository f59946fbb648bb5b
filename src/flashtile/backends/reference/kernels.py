"""Attention as the contract writes it: one tile that is the whole call, and torch.autograd for the gradients."""

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs
from ...plan import Plan
from ...problem import accumulation_dtype
from ..common.boundary import lse_of_rows
from ..common.scores import Scores, Tile
from ..common.softmax import finite_or_zero
from ..common.tiles import Rows, Side, Slab, fold_groups, slabs, unfold_groups


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    t = call.tensors
    dtype = accumulation_dtype(t.q.dtype)
    queries, keys = Side(call, keys=False), Side(call, keys=True)
    out = queries.buffer(t.q, t.q.shape[1], t.v.shape[-1], dtype)  # [B, Hq, Sq, Dv] or [T + 1, Hq, Dv]
    lse = queries.buffer(t.q, t.q.shape[1], 1, dtype, fill=-torch.inf)
    for slab in slabs(call, queries, keys, plan.tile):
        if slab.seqlen_q > 0:
            attend(call, slab, slab.query_rows(out), slab.query_rows(lse))
    return queries.finished(out).to(t.q.dtype), lse_of_rows(call, queries.finished(lse))


def attend(call: Call, slab: Slab, out: Rows, lse: Rows) -> None:
    """Softmax attention of a slab, from its formula."""
    t, settings, groups = call.tensors, call.settings, slab.num_groups
    dtype = accumulation_dtype(t.q.dtype)
    scores = Scores(call, slab, dtype)
    tile = Tile(slice(0, slab.seqlen_q), slice(0, slab.seqlen_k), full=False)
    q_rows, k_rows, v_rows = (slab.query_rows(t.q), *(slab.key_rows(x) for x in (t.k, t.v)))
    q = fold_groups(q_rows.load(tile.rows).to(dtype), groups)  # [B, Hkv, G * Sq, D]
    k, v = k_rows.load(tile.keys).to(dtype), v_rows.load(tile.keys).to(dtype)  # [B, Hkv, Sk, D], [B, Hkv, Sk, Dv]
    s = unfold_groups(q @ k.transpose(-1, -2) * settings.scale, groups)  # [B, Hq, Sq, Sk]
    visible = scores.visible(tile, q_rows.exists(tile.rows), k_rows.exists(tile.keys))
    s = scores.forward(s, tile, visible)
    if visible is not None:
        s = torch.where(visible, s, -torch.inf)
    if scores.sinks is not None:  # one more key, without a value
        s = torch.cat((s, scores.sinks.expand(*s.shape[:-1], 1)), dim=-1)  # [B, Hq, Sq, Sk + 1]
    if s.shape[-1] == 0:
        return
    m = finite_or_zero(s.detach().amax(dim=-1, keepdim=True))  # [B, Hq, Sq, 1]
    total = torch.exp(s - m).sum(dim=-1, keepdim=True)
    empty = total == 0  # log and division never see these rows, in backward neither
    row_lse = torch.where(empty, -torch.inf, m + torch.log(torch.where(empty, 1, total)))
    row_lse = torch.where(m == torch.inf, m, row_lse)
    p = torch.exp(s - torch.where(empty, 0, row_lse))[..., : slab.seqlen_k]
    keep = scores.keep(tile)
    if keep is not None:
        p = p * keep
    lse.store(tile.rows, row_lse)
    out.store(tile.rows, unfold_groups(fold_groups(p, groups) @ v, groups))


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    """Forward once more on leaves, and torch.autograd through it; leaves in the accumulation dtype lose no bits."""
    dtype = accumulation_dtype(call.tensors.q.dtype)
    leaves = {
        name: x.detach().to(dtype).requires_grad_()
        for name, x in call.tensors._asdict().items()
        if isinstance(x, Tensor) and getattr(needs, name, False)
    }
    modifiers = [
        x.detach().to(dtype).requires_grad_() if needed else x
        for x, needed in zip(call.tensors.score_mod_tensors, needs.score_mod_tensors, strict=True)
    ]
    upcast = {name: getattr(call.tensors, name).detach().to(dtype) for name in ("q", "k", "v")} | leaves
    recall = call._replace(tensors=call.tensors._replace(**upcast, score_mod_tensors=modifiers))
    with torch.enable_grad():
        results = forward(plan, recall)
    wanted = [*leaves.values(), *(x for x, needed in zip(modifiers, needs.score_mod_tensors, strict=True) if needed)]
    found = iter(gradients(results, (dout, dlse), wanted, dtype))
    named = {name: next(found) for name in leaves}
    modified = tuple(next(found) if needed else None for needed in needs.score_mod_tensors)
    return Gradients(**named, score_mod_tensors=modified)


def gradients(
    results: tuple[Tensor, ...], cotangents: tuple[Tensor | None, ...], wanted: list[Tensor], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """torch.autograd.grad, where a result may have no cotangent or, for want of keys, depend on nothing."""
    pairs = [(x, dx.to(dtype)) for x, dx in zip(results, cotangents, strict=True) if dx is not None and x.requires_grad]
    if not pairs or not wanted:
        return tuple(torch.zeros_like(x) for x in wanted)
    outputs, given = zip(*pairs, strict=True)
    return torch.autograd.grad(outputs, wanted, given, allow_unused=True, materialize_grads=True)
