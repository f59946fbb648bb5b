"""Step 5. FlashAttention-1 in PyTorch: tiles, K and V in the outer loop.

The change. S and P are made tile by tile in SRAM and never written to HBM. Tiles are joined by
the online softmax of step 1; with m~, P~ = exp(S - m~) and l~ = rowsum(P~) of the tile at hand,

    m_new = max(m, m~)        l_new = exp(m - m_new) l + exp(m~ - m_new) l~
    O = (exp(m - m_new) l O + exp(m~ - m_new) P~ V) / l_new

Why it is faster. K and V are read once, and Q, O, l, m once for each of the Tc = N / Bc key blocks. Blocks are as large
as an SRAM of M elements lets four of them be, Bc = ceil(M / 4d) keys, so Tc = 4 N d / M and all reads and
writes together are in Theta(N² d² / M): standard attention's N² divided by M / d², which is 12 for d = 64 and
48 K elements. Memory beyond inputs and results is that of a tile, l and m.

Backward makes the tiles of P again from q, k and lse: more operations, and yet faster, because nothing of size N² is
read. Dropout too is made again: what is kept for backward is the state of the random number generator.

`plain` is the loop alone. `attention` adds what a call may ask for: causal, a mask, dropout, lse, blocks for an SRAM.

(Dao et al., "FlashAttention", 2022: algorithm 1; 2 in appendix B for masks and dropout; 4 for backward; 5 for blocks.)
`x[...]` on the right is a read of HBM and `x[...] =` a write, as in step 4.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ._host.shapes import one_shape

M = 48 * 1024  # elements of SRAM: 192 KB of float32, as on an A100
Tile = tuple[slice, slice]  # rows, keys


def block_sizes(memory: int, d: int) -> tuple[int, int]:
    """Br rows and Bc keys of a tile, for `memory` elements on chip: Bc = ceil(M / 4d), Br = min(Bc, d)."""
    keys = math.ceil(memory / (4 * d))
    return min(keys, d), keys


def plain(q: Tensor, k: Tensor, v: Tensor, block: int = 4) -> Tensor:
    """`[N, d]` to out `[N, d]`: FlashAttention-1 without options. Read this first."""
    n, d = one_shape(q, k, v)
    out, l, m = torch.zeros_like(q), q.new_zeros((n, 1)), q.new_full((n, 1), -math.inf)
    for j in range(0, n, block):  # a block of keys and values is read once
        k_j, v_j = k[j : j + block], v[j : j + block]
        for i in range(0, n, block):  # for all rows, each with its state
            rows = slice(i, i + block)
            s = q[rows] @ k_j.mT / math.sqrt(d)  # the scores of one tile
            m_new = torch.maximum(m[rows], s.amax(dim=1, keepdim=True))
            p = torch.exp(s - m_new)  # the weights of the tile, before they are divided
            kept = l[rows] * torch.exp(m[rows] - m_new)  # the sum so far, in units of the new maximum
            l_new = kept + p.sum(dim=1, keepdim=True)
            out[rows] = (kept * out[rows] + p @ v_j) / l_new
            l[rows], m[rows] = l_new, m_new
    return out


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *, mask: Tensor | None = None,
    blocks: Tensor | None = None, dropout_p: float = 0.0, rng_state: Tensor | None = None, memory: int = M,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[N, d]` to out `[N, d]` and lse `[N]`.

    `mask` is bool `[N, N]`, True where a row sees a key; a row that sees none gives 0 and -inf. `blocks` is a mask of
    whole tiles, bool `[ceil(N / Br), ceil(N / Bc)]` (the paper's algorithm 5, block-sparse): what it hides is neither
    read nor computed. With dropout,
    `rng_state` (of a `torch.Generator` on q's device, from `get_state()`) is the R of the paper: give the same one to
    `backward`.
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    generator = restored(rng_state, q.device) if dropout_p else None
    out, l, m = q.new_zeros((n, d)), q.new_zeros((n,)), q.new_full((n,), -math.inf)
    lse = q.new_empty((n,))
    row_blocks, key_blocks = tiles(n, d, memory)
    sees = checked(blocks, row_blocks, key_blocks)
    for j, keys in enumerate(key_blocks):  # outer: K and V are read once
        if not sees[:, j].any():
            continue
        k_j, v_j = k[keys], v[keys]  # [Bc, d]
        for rows in visited(row_blocks, keys, causal, sees[:, j]):  # inner: Q, O, l, m come and go each time
            q_i, o_i, l_i, m_i = q[rows], out[rows], l[rows], m[rows]  # [Br, d], [Br, d], [Br], [Br]
            s = hide(scale * (q_i @ k_j.mT), (rows, keys), causal, mask)  # [Br, Bc]
            m_tile = s.amax(dim=1)  # [Br]
            p = torch.exp(s - finite(m_tile)[:, None])  # [Br, Bc]
            l_tile = p.sum(dim=1)  # [Br]
            m_new = torch.maximum(m_i, m_tile)  # [Br]
            old = l_i * torch.exp(m_i - finite(m_new))  # [Br]
            new = torch.exp(m_tile - finite(m_new))  # [Br]
            l_new = old + new * l_tile  # [Br]
            if generator is not None:
                p = p * keep_factors(generator, p, dropout_p)  # after l: dropout acts on the normalised weights
            o_new = (old[:, None] * o_i + new[:, None] * (p @ v_j)) / positive(l_new)[:, None]  # [Br, d]
            out[rows], l[rows], m[rows] = o_new, l_new, m_new
    for rows in row_blocks:  # the paper keeps l and m; their one number is enough
        lse[rows] = m[rows] + torch.log(l[rows])
    return out, lse


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool = False,
    scale: float | None = None, *, mask: Tensor | None = None, blocks: Tensor | None = None, dropout_p: float = 0.0,
    rng_state: Tensor | None = None, memory: int = M,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv `[N, d]`. Same loops as forward, so the generator gives every tile the numbers it had there.

        P = exp(S - lse)      dV += (P ∘ Z)ᵀ dO      dP = (dO Vᵀ) ∘ Z      delta = rowsum(dO ∘ O)
        dS = P ∘ (dP - delta)                        dQ += scale dS K      dK += scale dSᵀ Q

    Z is dropout's factor: 0, or 1 / (1 - dropout_p).
    """
    n, d = one_shape(q, k, v)
    scale = 1 / math.sqrt(d) if scale is None else scale
    generator = restored(rng_state, q.device) if dropout_p else None
    dq, dk, dv = q.new_zeros((n, d)), q.new_empty((n, d)), q.new_empty((n, d))
    row_blocks, key_blocks = tiles(n, d, memory)
    sees = checked(blocks, row_blocks, key_blocks)
    for j, keys in enumerate(key_blocks):
        k_j, v_j = k[keys], v[keys]  # [Bc, d]
        dk_j, dv_j = torch.zeros_like(k_j), torch.zeros_like(v_j)  # [Bc, d]
        for rows in visited(row_blocks, keys, causal, sees[:, j]):
            q_i, o_i, do_i, dq_i, lse_i = q[rows], out[rows], dout[rows], dq[rows], lse[rows]  # [Br, d] x 4, [Br]
            s = hide(scale * (q_i @ k_j.mT), (rows, keys), causal, mask)  # [Br, Bc]
            p = torch.exp(s - finite(lse_i)[:, None])  # [Br, Bc]
            dp = do_i @ v_j.mT  # [Br, Bc]
            kept = p
            if generator is not None:
                z = keep_factors(generator, p, dropout_p)  # [Br, Bc]
                kept, dp = p * z, dp * z
            dv_j += kept.mT @ do_i
            delta = (do_i * o_i).sum(dim=1)  # [Br]
            ds = scale * p * (dp - delta[:, None])  # [Br, Bc]
            dq[rows] = dq_i + ds @ k_j
            dk_j += ds.mT @ q_i
        dk[keys], dv[keys] = dk_j, dv_j
    return dq, dk, dv


def tiles(n: int, d: int, memory: int) -> tuple[list[slice], list[slice]]:
    """Row blocks and key blocks of N positions; the last of each may be shorter."""
    block_rows, block_keys = block_sizes(memory, d)
    rows = [slice(i, min(i + block_rows, n)) for i in range(0, n, block_rows)]
    return rows, [slice(j, min(j + block_keys, n)) for j in range(0, n, block_keys)]


def checked(blocks: Tensor | None, row_blocks: list[slice], key_blocks: list[slice]) -> Tensor:
    """Which block of rows sees which block of keys: all of them unless `blocks` says otherwise."""
    shape = len(row_blocks), len(key_blocks)
    if blocks is not None and tuple(blocks.shape) != shape:
        raise ValueError(f"blocks is {tuple(blocks.shape)}; here it is {shape}")
    return torch.ones(shape, dtype=torch.bool) if blocks is None else blocks


def visited(row_blocks: list[slice], keys: slice, causal: bool, sees: Tensor) -> Iterator[slice]:
    """Row blocks with a row that sees one of these keys. `sees` is the one line of block-sparse attention."""
    for rows, seen in zip(row_blocks, sees.tolist(), strict=True):
        if seen and (not causal or rows.stop > keys.start):
            yield rows


def hide(s: Tensor, tile: Tile, causal: bool, mask: Tensor | None) -> Tensor:
    """MASK(S) `[Br, Bc]`: -inf where a row does not see a key."""
    rows, keys = tile
    if causal and keys.stop - 1 > rows.start:
        i = torch.arange(rows.start, rows.stop, device=s.device)[:, None]  # [Br, 1]
        j = torch.arange(keys.start, keys.stop, device=s.device)  # [Bc]
        s = s.masked_fill(j > i, -math.inf)
    return s if mask is None else s.masked_fill(~mask[rows, keys], -math.inf)


def finite(m: Tensor) -> Tensor:
    """A maximum to subtract; 0 for a row that has seen nothing, so that exp(-inf - m) is 0 and not NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def positive(l: Tensor) -> Tensor:
    """A denominator; 1 for a row that has seen nothing, whose output is 0."""
    return l.masked_fill(l == 0, 1.0)


def restored(rng_state: Tensor | None, device: torch.device) -> torch.Generator:
    if rng_state is None:
        raise TypeError("dropout needs `rng_state`: torch.Generator(device).manual_seed(seed).get_state()")
    generator = torch.Generator(device)
    generator.set_state(rng_state)
    return generator


def keep_factors(generator: torch.Generator, p: Tensor, dropout_p: float) -> Tensor:
    """Z `[Br, Bc]` of the next tile: 0 with probability dropout_p, else 1 / (1 - dropout_p)."""
    kept = torch.rand(p.shape, generator=generator, device=p.device) >= dropout_p
    return kept.to(p.dtype) / (1 - dropout_p)
