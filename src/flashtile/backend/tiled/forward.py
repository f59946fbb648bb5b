"""FlashAttention-2's forward pass in torch operations (Dao, "FlashAttention-2", 2023, algorithm 1).

The outer loop is over blocks of query rows, the inner one over key blocks, with an online softmax: only the scores of
one tile are in memory.
"""

from functools import partial

import torch
from torch import Tensor

from ...call.call import Call
from ..blockwise import softmax
from ..blockwise.eight_bit import key_and_value_rows
from ..blockwise.scores import Scores, Tile
from ..blockwise.softmax import RowState
from ..blockwise.sums import TILES_PER_CARRY, chunked_matmul
from ..blockwise.tiles import Rows, Side, Slab, TileShape, fold_groups, slabs, unfold_groups
from .loop import row_blocks, tiles


def forward(call: Call, shape: TileShape, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """`out [B, Hq, Sq, Dv]` or `[Tq, Hq, Dv]` in `call.out_dtype`, and `lse [..., 1]` and its residual in `dtype`."""
    tensors = call.tensors
    queries, keys = Side(call, keys=False), Side(call, keys=True)
    num_heads = tensors.q.shape[1]
    out = queries.buffer(tensors.q, num_heads, tensors.v.shape[-1], call.out_dtype)
    lse = queries.buffer(tensors.q, num_heads, 1, dtype, fill=-torch.inf)
    residual = queries.buffer(tensors.q, num_heads, 1, dtype)
    for slab in slabs(call, queries, keys, shape):
        forward_slab(call, slab, shape, dtype, [slab.query_rows(x) for x in (out, lse, residual)])
    return queries.result(out), queries.result(lse), queries.result(residual)


def forward_slab(call: Call, slab: Slab, shape: TileShape, dtype: torch.dtype, results: list[Rows]) -> None:
    scores = Scores(call, slab, dtype)
    for rows in row_blocks(slab, shape):
        for result, of_rows in zip(results, forward_rows(call, slab, shape, scores, rows), strict=True):
            result.store(rows, of_rows)


def forward_rows(
    call: Call, slab: Slab, shape: TileShape, scores: Scores, rows: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """`out [B, Hq, M, Dv]`, `lse [B, Hq, M, 1]` and its residual for one block of rows. All operations but the
    residual's are differentiable, because `transforms` differentiates this function, in forward and reverse mode and to
    any order.
    """
    tensors, groups, dtype = call.tensors, slab.num_groups, scores.dtype
    q, (k, v) = slab.query_rows(tensors.q), key_and_value_rows(call, slab, dtype)
    q_i = fold_groups(q.load(rows).to(dtype) * call.settings.scale, groups)  # [B, Hkv, G * M, D]
    leading = (q_i.shape[0], slab.heads_q.stop - slab.heads_q.start, rows.stop - rows.start)  # B, Hq, M
    empty = partial(softmax.initial_state, shape=leading, head_dim_v=tensors.v.shape[-1], like=q_i)
    state = None if scores.sinks is None else empty(scores.sinks)  # state of the tiles since the last carry
    subtrees: list[RowState] = []  # states of 2**n * TILES_PER_CARRY tiles, largest first: a pairwise sum
    for n, tile in enumerate(tiles(slab, call.settings, scores, rows, shape)):
        if n % TILES_PER_CARRY == 0 and state is not None and n > 0:
            subtrees, state = push_state(subtrees, state, n // TILES_PER_CARRY), None
        k_j, v_j = k.load(tile.keys), v.load(tile.keys)  # [B, Hkv, N, D], [B, Hkv, N, Dv]
        exist = q.exists(rows), k.exists(tile.keys)
        # No name for the scores: it would keep a tile's while the next one's are computed.
        state = update(state, tile_scores(scores, tile, q_i, k_j, exist), v_j, scores.keep(tile), groups)
    state = empty(None) if state is None else state
    while subtrees:
        state = softmax.join(subtrees.pop(), state)
    out, lse = softmax.finalize(state)
    residual = softmax.lse_residual(state.m, state.l.detach(), lse.detach())
    if scores.sinks is not None:  # where the sink takes all the weight, lse is the sink, and moves with it
        lse = torch.where((scores.sinks == torch.inf) & (lse == torch.inf), scores.sinks, lse)
    return out, lse, residual


def tile_scores(
    scores: Scores, tile: Tile, q_i: Tensor, k_j: Tensor, exist: tuple[Tensor | None, Tensor | None]
) -> Tensor:
    """Final scores `[B, Hq, M, N]` of a tile, -inf where a pair is hidden.

    Args:
        scores: the score features of the slab.
        tile: the tile.
        q_i: `[B, Hkv, G * M, D]`, with the scale.
        k_j: `[B, Hkv, N, D]`.
        exist: which rows and keys exist, `[B, M]` and `[B, N]`; `None` if all do.
    """
    s = unfold_groups(q_i @ k_j.transpose(-1, -2), scores.slab.num_groups)
    visible = scores.visible(tile, *exist)
    s = scores.forward(s, tile, visible)
    return s if visible is None else torch.where(visible, s, -torch.inf)


def row_max(call: Call, shape: TileShape, dtype: torch.dtype) -> Tensor:
    """The largest final score of each row of a dense call, `[B, Hq, Sq]`; -inf of a row that sees no key."""
    q, k = call.tensors.q, call.tensors.k
    result = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    for slab in slabs(call, Side(call, keys=False), Side(call, keys=True), shape):
        scores = Scores(call, slab, dtype)
        queries, keys = slab.query_rows(q), slab.key_rows(k)
        for rows in row_blocks(slab, shape):
            q_i = fold_groups(queries.load(rows).to(dtype) * call.settings.scale, slab.num_groups)
            m_i = result[slab.batch, slab.heads_q, rows]
            for tile in tiles(slab, call.settings, scores, rows, shape):
                s = tile_scores(scores, tile, q_i, keys.load(tile.keys).to(dtype), (None, None))
                m_i.copy_(torch.maximum(m_i, s.amax(dim=-1)))
    return result


def push_state(subtrees: list[RowState], state: RowState, count: int) -> list[RowState]:
    """Push state number `count`, from 1, onto the stack of a pairwise sum: states of equally many tiles are joined."""
    while count % 2 == 0:
        *subtrees, last = subtrees
        state, count = softmax.join(last, state), count // 2
    return [*subtrees, state]


def update(state: RowState | None, s: Tensor, v: Tensor, keep: Tensor | None, num_groups: int) -> RowState:
    """The online-softmax update with one tile of final scores; `None` is the state before the first key. Dropout
    applies to `p` in `acc`, not in `l`.
    """
    m = s.detach().amax(dim=-1, keepdim=True)  # [B, Hq, M, 1]
    if state is not None:
        m = torch.maximum(state.m, m)
    p = torch.exp(s - softmax.finite_or_zero(m))  # [B, Hq, M, N]
    l = p.sum(dim=-1, keepdim=True)  # noqa: E741
    if keep is not None:
        p = p * keep
    pv = unfold_groups(chunked_matmul(fold_groups(p, num_groups), v), num_groups)  # [B, Hq, M, Dv]
    if state is None:
        return RowState(m, l, pv)
    alpha = softmax.rescale(state.m, m)
    return RowState(m, state.l * alpha + l, state.acc * alpha + pv)
