"""Random functions that can be traced."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

REALS: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    ("tanh", torch.tanh), ("exp", lambda x: torch.exp(-x.abs())), ("log", lambda x: torch.log(x.abs() + 0.5)),
    ("sigmoid", torch.sigmoid), ("erf", torch.erf), ("sqrt", lambda x: torch.sqrt(x.abs() + 0.1)),
    ("rsqrt", lambda x: torch.rsqrt(x * x + 0.1)), ("abs", torch.abs), ("neg", lambda x: -x), ("cube", lambda x: x**3),
    ("inverse", lambda x: (x.square() + 1) ** -1), ("power", lambda x: (x.abs() + 0.2) ** 1.7),
    ("clamp", lambda x: x.clamp(-0.5, 0.7)), ("relu", torch.relu), ("sign", lambda x: x * torch.sign(x - 0.3)),
    ("floor", lambda x: x - torch.floor(x)),
)  # fmt: skip
PAIRS: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    ("add", lambda x, y: x + y), ("sub", lambda x, y: x - y), ("mul", lambda x, y: x * y),
    ("div", lambda x, y: x / (1 + y * y)), ("minimum", torch.minimum), ("maximum", torch.maximum),
    ("where", lambda x, y: torch.where(x < y, x * y, y - 1)), ("rsub", lambda x, y: torch.rsub(x, y, alpha=2)),
)  # fmt: skip
INTEGERS: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    ("add", lambda i, j: i + j), ("sub", lambda i, j: i - j), ("mul", lambda i, j: 3 * i * j),
    ("abs", lambda i, j: abs(i - j)), ("sign", lambda i, j: torch.sign(i - j)),
    ("div", lambda i, j: (i - j) // 3), ("mod", lambda i, j: (i - j) % 5), ("clamp", lambda i, j: (i - j).clamp(-2, 3)),
    ("min", lambda i, j: torch.minimum(i, j) - 1),
    ("bits", lambda i, j: (i & 5) | (j ^ 3)), ("shift", lambda i, j: (i - j >> 1) + (j << 2)),

    ("where", lambda i, j: torch.where((i < j) & ~(j == 3), i, -j)), ("to", lambda i, j: (i / (j + 1)).to(torch.int64)),
)  # fmt: skip


@st.composite
def functions(draw: st.DrawFn) -> Callable[..., Tensor]:
    """A function `(score, b, h, q_idx, k_idx, weight [4], table [4, 7])` of random operations."""
    steps = draw(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)), min_size=2, max_size=9)
    )

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        reals, integers = [score, score * 0.5 + 0.1], [b, h, i, j]
        for which, x, y in steps:
            a, c = reals[x % len(reals)], reals[y % len(reals)]
            m, n = integers[x % len(integers)], integers[y % len(integers)]
            if which % 4 == 0:
                integers.append(INTEGERS[which // 4 % len(INTEGERS)][1](m, n))
            elif which % 4 == 1:
                reals.append(REALS[which // 4 % len(REALS)][1](a))
            elif which % 4 == 2:
                reals.append(PAIRS[which // 4 % len(PAIRS)][1](a, c))
            else:
                reads = (weight[h], table[h, m % 7], table[n % 4, -1], (m - n) * 0.1, torch.where(m > n, a, 0.25))
                reals.append(a * 0.9 + reads[which // 4 % len(reads)])
        return sum(reals[1:], reals[0])

    fn.__qualname__ = f"function of {steps}"  # which hypothesis shows
    return fn
