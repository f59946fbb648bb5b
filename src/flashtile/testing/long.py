"""Long problems, each reproducible from its seed: a few rows by up to 2**20 keys, or a few keys by as many rows.

Long sums show errors that grow with the length, which short problems hide. One side is a few tokens, so that the
oracle's tables of pairs take memory in proportion to the other.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .case import Case

LONGEST = 2**20
SHORTEST = 2**12
HALVINGS = int(math.log2(LONGEST // SHORTEST)) + 1
FEW = (1, 2, 3, 5)  # tokens of the other side
HEADS = ((1, 1), (2, 1), (2, 2), (4, 2))  # heads of queries, of keys
HEAD_DIMS = (4, 8, 16, 33, 64)
MAX_ELEMENTS = 2**24  # elements of the long side's tokens, with their rows of pairs
THIRD = 1 / 3  # no sum of its multiples is exact


def long_case(
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtypes: tuple[torch.dtype, ...] | None = None,
    longest: int = LONGEST,
) -> Case:
    """The long problem number `seed`; the same values on every device.

    The long side has SHORTEST to `longest` tokens, or fewer where `longest` is less.
    """
    rng = random.Random(f"long {seed}")
    generator = torch.Generator().manual_seed(seed)
    dtype = rng.choice(dtypes or (torch.float16, torch.bfloat16, torch.float32, torch.float64))
    length = max(longest >> rng.randrange(HALVINGS), min(longest, SHORTEST))
    sizes = [(n, m, few, dim) for n, m in HEADS for few in FEW for dim in HEAD_DIMS]
    sizes = [x for x in sizes if length * x[0] * (2 * x[3] + 8 * x[2]) <= MAX_ELEMENTS]
    heads_q, heads_kv, few, head_dim = rng.choice(sizes)
    length -= rng.choice((0, 0, 1, 7, 100))
    many_rows = rng.random() < 0.35
    seqlen_q, seqlen_k = (length, few) if many_rows else (few, length)

    values = rng.choice(list(VALUES))
    shapes = ((1, heads_q, seqlen_q, head_dim), (1, heads_kv, seqlen_k, head_dim), (1, heads_kv, seqlen_k, head_dim))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    q, k, v, dout = VALUES[values](rng, q, k, v, torch.randn(shapes[0], generator=generator, dtype=torch.float64))
    dlse = torch.full(shapes[0][:3], THIRD, dtype=torch.float64) if rng.random() < 0.3 else None
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    arguments: dict[str, Any] = {name: x.to(dtype).to(device) for name, x in (("q", q), ("k", k), ("v", v))}
    arguments |= features(rng, generator, dtype, (heads_q, seqlen_q, seqlen_k), torch.device(device))
    cotangent = None if dout is None else dout.to(dtype).to(device)
    case = Case("attention", arguments, cotangent, None if dlse is None else dlse.to(wide).to(device), seed)
    case.description = f"long, {values}: {case.description}"
    return case


def features(
    rng: random.Random,
    generator: torch.Generator,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    device: torch.device,
) -> dict[str, Any]:
    """At most one feature, chosen for the sums that it adds; `sizes` are Hq, Sq, Sk."""
    heads_q, seqlen_q, seqlen_k = sizes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    chosen = rng.choice(("plain", "plain", "causal", "sinks", "slopes", "dropout", "bias", "bias", "softcap"))
    if chosen == "causal":
        return {"causal": "top_left" if seqlen_q > seqlen_k else True}
    if chosen == "sinks":
        return {"sinks": torch.randn(heads_q, generator=generator).to(wide).to(device)}
    if chosen == "slopes":
        return {"alibi_slopes": torch.full((heads_q,), THIRD / max(seqlen_q, seqlen_k), dtype=wide, device=device)}
    if chosen == "dropout":
        return {"dropout_p": 0.3, "dropout_seed": rng.getrandbits(63)}
    if chosen == "bias":
        shape = rng.choice(((1, 1, 1, 1), (1, heads_q, 1, 1), (1, 1, 1, seqlen_k), (1, 1, seqlen_q, 1)))
        return {"bias": torch.randn(shape, generator=generator).to(dtype).to(device)}
    return {"softcap": 5.0} if chosen == "softcap" else {}


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def normal(rng: random.Random, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Four:
    """Independent elements, values and cotangents around 1, so that sums grow."""
    return q, k, v + 1, dout + 1


def constant(rng: random.Random, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Four:
    """Uniform weights over values that are all the same: every addition rounds in the same direction."""
    third = torch.full_like(q, THIRD)
    return torch.zeros_like(q), k, torch.full_like(v, THIRD), third


def nearly_uniform(rng: random.Random, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Four:
    """Weights that differ by some percent."""
    return q * 0.01, k, torch.full_like(v, THIRD), torch.full_like(dout, THIRD)


def ramp(rng: random.Random, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Four:
    """Scores that rise or fall evenly, by a little or much: each block of keys brings a new maximum, or none does."""
    width = rng.choice((0.3, 3.0, 30.0)) * rng.choice((-1, 1)) / q.shape[-1] ** 0.5
    slope = torch.linspace(0, width, k.shape[2], dtype=k.dtype)[:, None]
    rise = torch.linspace(0, 1, v.shape[2], dtype=v.dtype)[:, None]
    return torch.ones_like(q), slope.expand_as(k), rise.expand_as(v), dout + 1


def outlier(rng: random.Random, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Four:
    """One key far above all others, which share the remaining weight evenly."""
    k = torch.zeros_like(k)
    at = rng.randrange(k.shape[2])
    k[:, :, at] = rng.choice((1.0, 5.0, 9.0)) / q.shape[-1] ** 0.5
    v = torch.full_like(v, THIRD)
    v[:, :, at] = 10.0
    return torch.ones_like(q), k, v, torch.full_like(dout, THIRD)


VALUES: dict[str, Callable[..., Four]] = {
    "normal": normal,
    "constant": constant,
    "nearly uniform": nearly_uniform,
    "ramp": ramp,
    "outlier": outlier,
}
