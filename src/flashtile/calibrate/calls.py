"""The calls that are measured: calls of sweeps, and random ones."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..bench.cell import FORWARD_MODE, TIMED, Cell
from ..bench.sweep import load

DRAWN, SEED = 110, 7
MOVING = 60  # calls of forward mode
HEAD_DIMS = (16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 80, 96, 112, 128, 128, 128, 128, 160, 192, 256)
GROUPS, HEADS = (1, 1, 1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16)
MOST_FLOPS, MOST_ELEMENTS, MOST_BIASES = 4e12, 1e9, 5e8


def standard(sweeps: Sequence[Path]) -> list[Cell]:
    """All calls, each once."""
    cells = [cell for path in sweeps for cell in load(path).on("cuda").cells if cell.measure in TIMED]
    kept: dict[Cell, Cell] = {}
    for cell in [*cells, *drawn(DRAWN, SEED), *drawn(MOVING, SEED, (FORWARD_MODE,))]:
        kept.setdefault(replace(cell, model="", source=""), cell)
    return [cell for cell in kept.values() if cell.dtype != "float64"]


def drawn(count: int, seed: int, measures: Sequence[str] = ("forward", "backward")) -> list[Cell]:
    """Calls of random widths, heads, lengths and features."""
    rng, found = random.Random(seed), list[Cell]()
    while len(found) < count:
        head_dim, group, heads_kv = rng.choice(HEAD_DIMS), rng.choice(GROUPS), rng.choice(HEADS)
        rows = int(2 ** rng.uniform(5, 13))
        keys = rows if rng.random() < 0.75 else int(2 ** rng.uniform(5, 13))
        batch = max(1, int(2 ** rng.uniform(0, 7)))
        fields: dict[str, Any] = {
            "measure": rng.choice(measures), "batch": batch, "heads": heads_kv * group,
            "heads_kv": heads_kv, "seqlen_q": rows, "seqlen_k": keys, "head_dim": head_dim, "dtype": "bfloat16",
            "model": "drawn", "device": "cuda", "causal": rng.random() < 0.5,
        }  # fmt: skip
        cell = Cell.from_dict(fields | feature(rng, rows, batch))
        if cell.lengths:
            cell = replace(cell, batch=len(cell.lengths), seqlen_q=max(cell.lengths))
        elements = 0 if cell.lengths else batch * cell.heads * (rows + keys) * head_dim * 2
        biases = cell.heads * rows * keys if cell.bias else 0
        if cell.flops <= MOST_FLOPS and elements <= MOST_ELEMENTS and biases <= MOST_BIASES:
            found.append(cell)
    return found


def feature(rng: random.Random, rows: int, batch: int) -> dict[str, Any]:
    """A feature for four calls in ten."""
    choice = rng.random()
    if choice < 0.08:
        return {"softcap": 30.0}
    if choice < 0.16:
        return {"bias": True}
    if choice < 0.24:
        return {"window": (rng.choice([63, 127, 255, 1023]), 0)}
    if choice < 0.30:
        return {"alibi": True}
    if choice < 0.34:
        return {"dropout": 0.1}
    if choice < 0.44:
        lengths = tuple(max(1, int(rows * rng.uniform(0.3, 1))) for _ in range(min(batch, 16)))
        return {"lengths": lengths, "seqlen_k": None}
    return {}
