"""Random sharded calls: features and shapes from a seed."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile

B, D, DV = 2, 16, 24


class Shapes(NamedTuple):
    """The shape of a whole call."""

    heads: int
    kv_heads: int
    rows: int
    keys: int
    packed: bool = False

    @property
    def batch(self) -> int:
        return 3 if self.packed else B


def lists(shapes: Shapes, random: Callable[..., Tensor]) -> flashtile.BlockMask:
    """Lists of odd blocks that hide about half of them, show some in full, and the others by a function."""
    draws = random(shapes.batch, shapes.heads, -(-shapes.rows // 7), -(-shapes.keys // 5))
    lengths = None if shapes.packed else (shapes.rows, shapes.keys)
    listed = [(draws > 0.4), (draws > 0) & (draws <= 0.4)]
    entries = [x for y in listed for x in (y.sum(dim=3), y.to(torch.int8).argsort(dim=3, descending=True))]
    partly = flashtile.MaskMod(lambda b, h, i, j: (i + 2 * j) % 3 != h)
    return flashtile.BlockMask(*entries, block_size=(7, 5), seqlens=lengths, mask=partly)


def captured(shapes: Shapes, random: Callable[..., Tensor]) -> dict[str, Any]:
    table = random(shapes.heads)
    return {"score_mod": flashtile.ScoreMod(lambda s, b, h, i, j, t: s + t[h] * ((i - j) % 5), (table,))}


DENSE = {
    "causal": lambda s, random: {"causal": True},
    "top_left": lambda s, random: {"causal": "top_left"},
    "window": lambda s, random: {"window": (9, 4)},
    "window_far": lambda s, random: {"window": flashtile.ExactWindow(20, -3)},
    "chunk": lambda s, random: {"attention_chunk": 13},
    "softcap": lambda s, random: {"softcap": 3.0, "scale": 0.3},
    "dropout": lambda s, random: {"dropout_p": 0.3, "dropout_seed": 5},
    "slopes": lambda s, random: {"alibi_slopes": random(s.heads).abs()},
    "slopes_of_sequences": lambda s, random: {"alibi_slopes": random(s.batch, s.heads).abs()},
    "sinks": lambda s, random: {"sinks": random(s.heads)},
    "score_mod": lambda s, random: {"score_mod": lambda x, b, h, i, j: x + 0.01 * (i - 2 * j) * (h + 1) + b},
    "captured": captured,
    "mask_function": lambda s, random: {"mask": lambda b, h, i, j: (i * 3 + j + b + h) % 4 != 0},
    "lists": lambda s, random: {"mask": lists(s, random)},
    "deterministic": lambda s, random: {"deterministic": True},
}
PAIRS = {
    "bias": lambda s, random: {"bias": random(B, s.heads, s.rows, s.keys)},
    "bias_of_rows": lambda s, random: {"bias": random(1, 1, s.rows, s.keys)},
    "bias_of_keys": lambda s, random: {"bias": random(B, s.heads, 1, s.keys)},
    "mask": lambda s, random: {"mask": random(B, 1, s.rows, s.keys) > -0.7},
}
FIXED = {"mask", "mask_function", "lists"}  # of which a call has one


def draw(seed: int, size: int) -> tuple[list[str], Shapes]:
    """Two features and a shape. Lengths are often uneven, and sometimes leave ranks without rows."""
    rng = random.Random(seed)
    packed = rng.random() < 0.25
    table = DENSE if packed else DENSE | PAIRS
    names = sorted(rng.sample(sorted(table), 2))
    if sum(name.split("_of")[0] in ("bias", "slopes") for name in names) == 2 and len({n[:4] for n in names}) == 1:
        names = names[:1]
    for clash in (FIXED, {"causal", "top_left"}, {"window", "window_far"}, {"score_mod", "captured"}):
        if clash.issuperset(names):
            names = names[:1]
    kv_heads = rng.choice([1, 2, size])
    heads = kv_heads * size // (2 if kv_heads == 2 and size % 2 == 0 else kv_heads if kv_heads == size else 1)
    heads = max(heads, kv_heads)
    rows = rng.choice([rng.randrange(0, 5), *(rng.randrange(20, 70) for _ in range(5))])
    keys = rows if rng.random() < 0.5 else rng.choice([rng.randrange(0, 3), *(rng.randrange(20, 70) for _ in range(4))])
    return names, Shapes(heads, kv_heads, rows, keys, packed)


def arguments(names: list[str], shapes: Shapes, random: Callable[..., Tensor]) -> dict[str, Any]:
    """The arguments of features. Floating-point tensors require gradients."""
    found: dict[str, Any] = {}
    for name in names:
        found |= (DENSE | PAIRS)[name](shapes, random)
    for value in found.values():
        for x in (value, *getattr(value, "tensors", ())):
            if isinstance(x, Tensor) and x.is_floating_point():
                x.requires_grad_()
    return found


def offsets(shapes: Shapes) -> tuple[list[int], list[int]]:
    """Offsets of three sequences, the second of which is short."""
    return [0, shapes.rows // 2, shapes.rows // 2 + shapes.rows // 7, shapes.rows], [
        0, shapes.keys // 3, shapes.keys // 3 + shapes.keys // 5, shapes.keys,
    ]  # fmt: skip
