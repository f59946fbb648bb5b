"""Time of a pass on one thread of a CPU: products, scores and loads of its tasks, and of `tiled` what PyTorch does, by
measured rates (`cpu.rates`).

Threads share the tasks of both backends alike, and results must not depend on their number, so a plan counts one. A
task visits whole blocks of keys, and computes whole vectors of rows.
"""

import importlib.util
from typing import TYPE_CHECKING

import torch

from ..call.call import Needs
from ..call.problem import Problem, accumulation_dtype
from .cpu import rates, targets
from .cpu.tile_config import TileConfig
from .cpu.workspace import BLOCK_N
from .gpu.cost import Cost, Counts, features
from .gpu.waves import Head, row_tiles

if TYPE_CHECKING:
    from .blockwise.tiles import TileShape


def time(problem: Problem, tile: TileConfig, needs: Needs | None) -> float:
    """Microseconds of a pass on one thread."""
    return cost(problem, tile, backward=needs is not None).time(rates.rates_here())


def tiled_time(problem: Problem, shape: "TileShape", *, backward: bool) -> float:
    """Microseconds of a pass of `tiled` on one thread; 0 where no other backend runs."""
    if importlib.util.find_spec("llvmlite") is None:
        return 0.0
    return tiled_cost(problem, shape, backward=backward).time(rates.rates_here())


def cost(problem: Problem, tile: TileConfig, *, backward: bool) -> Cost:
    """What a pass does."""
    p, (batch, rows, keys) = problem, problem.counts
    group = p.num_heads_q // max(p.num_heads_kv, 1)
    dtype = str(p.dtype).removeprefix("torch.")
    decodes = tile.decodes and not backward
    positions = max(1, -(-tile.rows // group))
    head = row_tiles(p.window, rows, keys, positions, BLOCK_N)
    visited = batch * p.num_heads_kv * keys_of(head, keys)  # keys, again for each task
    together = min(positions, rows) * group
    pairs = visited * (together if decodes else padded(together, p.dtype))
    kernel = "backward" if backward else "decode" if decodes else "rows"
    width = p.head_dim + p.head_dim_v
    counts = Counts()
    counts["launch backward" if backward else "launch"] = 1
    counts[f"{kernel} {dtype} product"] = pairs * width
    counts[f"{kernel} {dtype} score"] = pairs
    if not backward:
        counts[f"{kernel} {dtype} element"] = visited * width
    for feature in features(p):
        counts[f"{'backward ' * backward}{feature}"] += pairs
    return Cost(counts, {})


def tiled_cost(problem: Problem, shape: "TileShape", *, backward: bool) -> Cost:
    """What a pass of `tiled` does: operations of PyTorch on all scores of the tiles that the window shows."""
    p, (batch, rows, keys) = problem, problem.counts
    kind = "tiled backward" if backward else "tiled forward"
    dtype = str(p.dtype).removeprefix("torch.")  # others than the accumulation dtype are converted
    head = row_tiles(p.window, rows, keys, shape.block_m, shape.block_n)
    pairs = batch * p.num_heads_q * head.total.steps * min(shape.block_m, rows) * min(shape.block_n, keys)
    groups = -(-p.num_heads_kv // shape.heads_kv) * -(-batch // shape.batch)
    counts = Counts()
    counts[f"{kind} {dtype} product"] = pairs * (p.head_dim + p.head_dim_v)
    counts[f"{kind} {dtype} score"] = pairs
    counts[f"{kind} tile"] = head.total.steps * groups
    for feature in features(p):
        counts[f"{kind} {feature}"] += pairs
    return Cost(counts, {})


def keys_of(head: Head, keys: int) -> float:
    """Keys that all tasks of a head visit."""
    return head.count / len(head.sample) * sum(min(keys, tile.steps * BLOCK_N) for tile in head.sample)


def padded(rows: int, dtype: torch.dtype) -> int:
    """Rows of a task that are computed: whole vectors."""
    lanes = targets.timed().vector_bytes // accumulation_dtype(dtype).itemsize
    return -(-rows // lanes) * lanes
