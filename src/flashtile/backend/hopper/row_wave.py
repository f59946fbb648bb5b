"""The last wave of tiles of rows in a long forward pass: too few for all programs, so that their keys are split.

Whole waves are one launch and the rest is another one, a call of its own over the first rows of the last head: without
a window all tiles take the same time, and a tile more than whole waves takes as long as a wave.
"""

from typing import NamedTuple

from ...call.call import NO_FEATURES
from ...call.problem import Problem
from .split_times import TILE_BLOCKS, Tiles, cdiv
from .tile_config import ForwardConfig

LAUNCH_BLOCKS = 4.0  # time between the launches, in blocks of keys
LEAST_GAIN = 0.01  # of the time of all waves, for which the last one is divided


class RowWave(NamedTuple):
    """Tiles at the end of the queue, the programs that share the keys of each, and what that saves of a wave's time."""

    tiles: int = 0
    splits: int = 1
    saved: float = 0.0


def is_divisible(problem: Problem) -> bool:
    """Whether a head's rows may be a call of their own, and the last tiles are those of the last head."""
    p = problem
    plain = p.features == NO_FEATURES and p.score_mod is None and p.mask_mod is None and not p.dropout
    return p.layout == "dense" and p.window.unlimited and plain and p.num_heads_q == p.num_heads_kv


def row_wave(config: ForwardConfig, heads: int, rows: int, keys: int, cores: int) -> RowWave:
    """The last wave of a call that is divisible; without tiles if dividing it is not worth it. `heads` are those of all
    sequences.
    """
    blocks, steps = cdiv(rows, config.block_m), cdiv(keys, config.block_n)
    waves, tiles = divmod(blocks * heads, cores)
    if config.programs_per_core > 1 or waves == 0 or not 0 < tiles <= blocks:
        return RowWave()
    bytes_per_split = tiles * config.block_m * config.head_dim_v.width * 8  # written and read, in fp32
    last = Tiles(tiles, steps, bytes_per_split)
    splits = last.fastest(cores)
    taken = last.time(splits, cores) + LAUNCH_BLOCKS
    saved = 1 - taken / (steps + TILE_BLOCKS)
    return RowWave(tiles, splits, saved) if saved > LEAST_GAIN * (waves + 1) else RowWave()
