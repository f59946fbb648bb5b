"""Random queries, keys, values, biases and cotangents of three kinds, from a generator.

- normal: independent standard normal elements.
- outliers: a few channels and a few tokens 10 to 30 times larger, as in trained transformers.
- adversarial: one of the patterns below. Ties, a dominating key, large equal values, subnormals, long tails, or a
  maximum that rises or falls with every tile.

In every kind scores stay far inside the range of float32, also for fp16 and bf16 inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

KINDS = ("normal", "outliers", "adversarial")
Triple = tuple[Tensor, Tensor, Tensor]


def query_key_value(
    kind: str, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, generator: torch.Generator
) -> Triple:
    """q, k, v of the given shapes, each [..., S, D] with tokens in the last dimension but one.

    `kind` is one of KINDS, or one adversarial pattern by its name.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (torch.randn(shape, generator=generator, dtype=wide) for shape in shapes)
    if kind == "outliers":
        q, k, v = (with_outliers(x, generator) for x in (q, k, v))
    elif kind != "normal":
        if kind == "adversarial":
            kind = tuple(PATTERNS)[int(torch.randint(len(PATTERNS), (), generator=generator))]
        q, k, v = PATTERNS[kind](q, k, v, torch.finfo(dtype), generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def with_outliers(x: Tensor, generator: torch.Generator) -> Tensor:
    """One channel in 32 and up to two tokens scaled by 10 to 30; [..., S, D]."""
    seqlen, width = x.shape[-2:]
    for dim, size, count in ((-1, width, 1 + width // 32), (-2, seqlen, min(seqlen, 2))):
        factors = torch.ones(size, dtype=x.dtype)
        chosen = torch.randperm(size, generator=generator)[:count]
        factors[chosen] = 10 + 20 * torch.rand(count, generator=generator, dtype=x.dtype)
        x = x * (factors if dim == -1 else factors[:, None])
    return x


def _ties(q: Tensor, k: Tensor, v: Tensor, info: torch.finfo, generator: torch.Generator) -> Triple:
    """Elements of -1, 0, 1: scores are small integers times the scale, and the maximum is shared by many keys."""
    return q.sign() * (q.abs() > 0.7), k.sign() * (k.abs() > 0.7), v


def _equal(q: Tensor, k: Tensor, v: Tensor, info: torch.finfo, generator: torch.Generator) -> Triple:
    """All scores large and equal: the softmax is uniform."""
    return torch.full_like(q, 6.0), torch.full_like(k, 6.0), v


def _dominant(q: Tensor, k: Tensor, v: Tensor, info: torch.finfo, generator: torch.Generator) -> Triple:
    """One key takes nearly all the weight of every row that sees it."""
    if k.shape[-2] > 0:
        k[..., int(torch.randint(k.shape[-2], (), generator=generator)), :] = 4.0
    return q * 0.5 + 1.0, k, v


def _tiny(q: Tensor, k: Tensor, v: Tensor, info: torch.finfo, generator: torch.Generator) -> Triple:
    """Magnitudes around the dtype's smallest normal number, half of them below."""
    return q * info.smallest_normal, k, v * info.smallest_normal


def _long_tails(q: Tensor, k: Tensor, v: Tensor, info: torch.finfo, generator: torch.Generator) -> Triple:
    """Student's t with two degrees of freedom, cut at 60."""

    def heavy(x: Tensor) -> Tensor:
        chi_square = -2 * torch.rand(x.shape, generator=generator, dtype=x.dtype).clamp_min(1e-6).log()
        return (x / (chi_square / 2).sqrt()).clamp(-60, 60)

    return heavy(q), heavy(k), heavy(v)


def _ramp(q: Tensor, k: Tensor, v: Tensor, info: torch.finfo, generator: torch.Generator) -> Triple:
    """Scores that rise or fall by about 20 from first to last key: every tile brings a new maximum, or none does."""
    seqlen, width = k.shape[-2:]
    direction = 1 - 2 * int(torch.randint(2, (), generator=generator))
    slope = torch.linspace(-direction, direction, seqlen, dtype=k.dtype)[:, None] * (10 / width**0.5)
    return q * 0.3 + 1.0, k * 0.5 + slope, v


PATTERNS: dict[str, Callable[..., Triple]] = {
    "ties": _ties,
    "equal": _equal,
    "dominant": _dominant,
    "tiny": _tiny,
    "long tails": _long_tails,
    "ramp": _ramp,
}


def bias_values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """An additive bias; adversarial ones are very negative in places, -inf in others."""
    bias = torch.randn(shape, generator=generator)
    if kind == "outliers":
        bias = bias * 5
    elif kind in ("adversarial", *PATTERNS):
        chance = torch.rand(shape, generator=generator)
        bias = bias.where(chance > 0.2, -100.0).where(chance > 0.1, -torch.inf)
    return bias.to(dtype)
