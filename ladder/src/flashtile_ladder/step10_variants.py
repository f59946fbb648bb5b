"""Step 10. From features to a compiled variant, and what a deterministic backward does.

The change. Attention in use is causal, has a local window, ALiBi slopes, a softcap or dropout, and lengths that no
tile divides. A kernel that asks for each of them on every tile is slow for all; a kernel written for each combination
is 64 kernels. So there is one text whose lines belong to features, and the kernel of a call is the text of its own
features alone, compiled once and kept. CUDA templates do this with `if constexpr`, Triton with `tl.constexpr` (step
8's third file), the product with its plans. Here the text is `LINES`, for backward `BACKWARD_LINES`; `source(features)`
picks, and `variant(features)` compiles.

Why it is faster. The parts that a call does not use are not there: no test, no register, no read. And where a tile lies
decides what it needs: with a window or causal, tiles are skipped (no row sees a key), full (each sees all: no mask
code), or partial.

    s = scale q k    s = cap tanh(s / cap)    s = s - slope |i - j|    s = -inf where hidden    P = exp(s - m)    P ∘ Z

`backward` shows the order of a sum. Key blocks run in parallel and all add to dQ; in the order of their arrival,
results differ in the last bits from run to run, for (a + b) + c is not a + (b + c). A deterministic backward gives
each of A workers its own dQ, lets each take its key blocks in order, and adds the A results in order: the same bits
always, for A times the memory of dQ.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._host.shapes import one_shape

BLOCK = 64


class Features(NamedTuple):
    """The features that a variant is specialized for: equal features, one compiled function."""

    causal: bool = False
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    dropout: bool = False
    uneven: bool = False  # N is not a multiple of the tile


class Values(NamedTuple):
    """Numbers that a call passes to its variant: they may change without another compilation."""

    scale: float
    window: tuple[int, int]
    softcap: float
    slope: float
    dropout_p: float
    seed: int


# A line belongs to all variants, or after `#:` to those with one of the features that are named there.
LINES = """\
def variant(q, k, v, x):
    n, d = q.shape
    out, lse = q.new_empty((n, d)), q.new_empty((n,))
    for first in range(0, n, BLOCK):
        q_i = x.scale * q[first : first + BLOCK]  # [BLOCK, d]
        q_i = padded(q_i)  #: uneven
        m = q_i.new_full((BLOCK,), -math.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(q_i)
        lo, hi = 0, n
        hi = min(hi, first + BLOCK)  #: causal
        lo = max(lo, first - x.window[0]) // BLOCK * BLOCK  #: window
        hi = min(hi, first + BLOCK + x.window[1])  #: window
        for start in range(lo, hi, BLOCK):
            k_j, v_j = k[start : start + BLOCK], v[start : start + BLOCK]  # [BLOCK, d]
            k_j, v_j = padded(k_j), padded(v_j)  #: uneven
            i, j = positions(first, start, q.device)  # [BLOCK, 1], [BLOCK]  #: causal window alibi dropout uneven
            s = q_i @ k_j.mT  # [BLOCK, BLOCK]
            s = x.softcap * torch.tanh(s / x.softcap)  #: softcap
            s = s - x.slope * (i - j).abs()  #: alibi
            if start + BLOCK > first:  # partial; other tiles are full  #: causal
                s = s.masked_fill(j > i, -math.inf)  #: causal
            if start < first + BLOCK - 1 - x.window[0] or start + BLOCK - 1 > first + x.window[1]:  #: window
                s = s.masked_fill((j < i - x.window[0]) | (j > i + x.window[1]), -math.inf)  #: window
            if start + BLOCK > n:  #: uneven
                s = s.masked_fill(j >= n, -math.inf)  #: uneven
            m_new = torch.maximum(m, s.amax(dim=1))
            m_safe = m_new
            m_safe = m_new.masked_fill(m_new == -math.inf, 0.0)  # a row may see nothing in its first tile  #: window
            alpha, p = torch.exp(m - m_safe), torch.exp(s - m_safe[:, None])
            l = l * alpha + p.sum(dim=1)
            p = p * keep_factors(x.seed, i, j, x.dropout_p).to(p.dtype)  #: dropout
            acc = acc * alpha[:, None] + p @ v_j
            m = m_new
        acc, row_lse = acc / l[:, None], m + torch.log(l)
        acc, row_lse = acc[: n - first], row_lse[: n - first]  #: uneven
        out[first : first + BLOCK], lse[first : first + BLOCK] = acc, row_lse
    return out, lse
"""


# The same for backward. Slices make partial tiles here, so that uneven lengths need no line.
BACKWARD_LINES = """\
def variant(q, k, v, out, lse, dout, x, order, accumulators):
    n, d = q.shape
    delta = (dout * out).sum(dim=1, keepdim=True)  # [N, 1]
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    for block in order:
        start, end = block * BLOCK, min((block + 1) * BLOCK, n)
        lo, hi = 0, n  # rows that see a key of the block
        lo = max(lo, start)  #: causal
        lo, hi = max(lo, start - x.window[1]), min(hi, end + x.window[0])  #: window
        keys, rows = slice(start, end), slice(lo, hi)
        q_i, dout_i = q[rows], dout[rows]  # [M, d]
        s = x.scale * (q_i @ k[keys].mT)  # [M, BLOCK]
        t = torch.tanh(s / x.softcap)  #: softcap
        s = x.softcap * t  #: softcap
        i = torch.arange(lo, hi, device=q.device)[:, None]  # [M, 1]  #: causal window alibi dropout
        j = torch.arange(start, end, device=q.device)  # [BLOCK]  #: causal window alibi dropout
        s = s - x.slope * (i - j).abs()  #: alibi
        s = s.masked_fill(j > i, -math.inf)  #: causal
        s = s.masked_fill((j < i - x.window[0]) | (j > i + x.window[1]), -math.inf)  #: window
        p = torch.exp(s - lse[rows, None])  # [M, BLOCK]
        kept, dp = p, dout_i @ v[keys].mT
        factors = keep_factors(x.seed, i, j, x.dropout_p).to(p.dtype)  #: dropout
        kept, dp = p * factors, dp * factors  #: dropout
        ds = x.scale * p * (dp - delta[rows])
        ds = ds * (1 - t * t)  #: softcap
        dk[keys], dv[keys] = ds.mT @ q_i, kept.mT @ dout_i  # [BLOCK, d]
        accumulators[block % len(accumulators)][rows] += ds @ k[keys]
    return dk, dv
"""


def source(features: Features, text: str = LINES) -> str:
    """The variant's text: the lines of its features and those of all."""
    on = {name for name, value in features._asdict().items() if value}
    lines = [line.partition("  #: ") for line in text.splitlines()]
    return "".join(f"{line}\n" for line, mark, names in lines if not mark or on & set(names.split()))


@functools.cache
def variant(features: Features, text: str = LINES) -> Callable[..., tuple[Tensor, Tensor]]:
    """The compiled function of these features; the second call with the same ones compiles nothing."""
    names: dict[str, Any] = dict(globals())
    exec(compile(source(features, text), f"<attention for {features}>", "exec"), names)
    return names["variant"]


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    window: tuple[int, int] | None = None, softcap: float | None = None, alibi_slope: float | None = None,
    dropout_p: float = 0.0, seed: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`[N, d]` to out `[N, d]` and lse `[N]`, by the variant for these features.

    `window` is (left, right), both at least 0: row i sees the keys i - left .. i + right.
    """
    given = {"window": window, "softcap": softcap, "alibi_slope": alibi_slope, "dropout_p": dropout_p, "seed": seed}
    features, values = requested(q, k, v, causal, scale, **given)
    return variant(features)(q, k, v, values)


def requested(  # the keywords of `attention` and `backward`
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, *,
    window: tuple[int, int] | None = None, softcap: float | None = None, alibi_slope: float | None = None,
    dropout_p: float = 0.0, seed: int = 0,
) -> tuple[Features, Values]:  # fmt: skip
    """The features that a call is compiled for, and the numbers that it passes."""
    n, d = one_shape(q, k, v)
    given = (window is not None, softcap is not None, alibi_slope is not None, dropout_p > 0)
    scale = 1 / math.sqrt(d) if scale is None else scale
    values = Values(scale, window or (0, 0), softcap or 0, alibi_slope or 0, dropout_p, seed)
    return Features(causal, *given, uneven=n % BLOCK != 0), values


def padded(x: Tensor) -> Tensor:
    """A tile of its full size, `[BLOCK, d]`, zeros at the end: tiles have one size in a compiled kernel."""
    return torch.nn.functional.pad(x, (0, 0, 0, BLOCK - len(x)))


def positions(first: int, start: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows `[BLOCK, 1]` and keys `[BLOCK]` of a tile, as positions in the sequence."""
    here = torch.arange(BLOCK, device=device)
    return first + here[:, None], start + here


def keep_factors(seed: int, i: Tensor, j: Tensor, dropout_p: float) -> Tensor:
    """Dropout's factor for rows `[M, 1]` and keys `[N]`, a hash of the position: any tile of any size can make it
    again.

    Good enough to show the idea. The product uses Philox, whose randomness is well tested.
    """
    x = (i * 0x9E3779B1 + j * 0x85EBCA77 + seed * 0xC2B2AE3D) & 0xFFFFFFFF
    for multiplier in (0x2C1B3C6D, 0x297A2D39):
        x = ((x ^ (x >> 15)) * multiplier) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    return (x >= dropout_p * 2**32) / (1 - dropout_p)


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, causal: bool = False,
    scale: float | None = None, *,
    deterministic: bool = False, workers: int = 4, arrival: Sequence[int] | None = None, **features: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv `[N, d]` of attention with the same features: `window`, `softcap` and the others.

    `arrival` is the order in which key blocks happen to finish, a permutation of their numbers. It changes the bits
    of dq unless `deterministic`.
    """
    chosen, values = requested(q, k, v, causal, scale, **features)
    compiled = variant(chosen._replace(uneven=False), BACKWARD_LINES)
    order = range(math.ceil(len(q) / BLOCK)) if arrival is None else arrival
    accumulators = [torch.zeros_like(q) for _ in range(workers if deterministic else 1)]  # [N, d] each
    if deterministic:  # workers come in any order, but each takes its own blocks w, w + A, w + 2A, ... in this one
        own = [iter(range(worker, len(order), workers)) for worker in range(workers)]
        order = [next(own[block % workers]) for block in order]
    dk, dv = compiled(q, k, v, out, lse, dout, values, order, accumulators)
    dq = accumulators[0]
    for other in accumulators[1:]:
        dq = dq + other
    return dq, dk, dv
