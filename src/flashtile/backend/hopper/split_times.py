"""Time of tiles whose steps are split among programs, in steps: blocks of keys of a tile of rows, or the reverse."""

from typing import NamedTuple

from ...call.problem import Problem
from .tile_config import DkdvConfig, FusedBackwardConfig

MAX_SPLITS = 32
TILE_BLOCKS = 2.0  # time of a tile's prologue and epilogue
COMBINE_BLOCKS = 4.0  # time of the launch that merges the splits
COMBINE_BYTES = 2**22  # of partial results that are merged in the time of a step


class Tiles(NamedTuple):
    """Tiles of equal length."""

    count: int
    steps: int  # of each
    bytes_per_split: int  # of partial results of all tiles

    def fastest(self, cores: int, slack: float = 1.0) -> int:
        """The fewest splits that take at most `slack` times the least time."""
        choices = range(1, max(1, min(MAX_SPLITS, self.steps)) + 1)
        times = [self.time(splits, cores) for splits in choices]
        return next(splits for splits, taken in zip(choices, times, strict=True) if taken <= slack * min(times))

    def time(self, splits: int, cores: int) -> float:
        """Time of whole waves of tiles, and of the sum of the splits' results."""
        tile = cdiv(self.steps, splits) + TILE_BLOCKS
        merging = COMBINE_BLOCKS + splits * self.bytes_per_split / COMBINE_BYTES if splits > 1 else 0
        return cdiv(self.count * splits, cores) * tile + merging


def key_tiles(problem: Problem, config: FusedBackwardConfig | DkdvConfig) -> Tiles:
    """A dense call's tiles of keys, each of which visits all rows of its group's query heads."""
    heads = problem.num_heads_kv * problem.batch
    steps = cdiv(problem.seqlen_q, config.block_m) * (problem.num_heads_q // problem.num_heads_kv)
    # written and read, in fp32
    bytes_per_split = problem.seqlen_k * heads * (problem.head_dim + problem.head_dim_v) * 8
    return Tiles(cdiv(problem.seqlen_k, config.block_n) * heads, steps, bytes_per_split)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def divisors(n: int) -> list[int]:
    """The numbers of programs that share a group of `n` heads evenly."""
    return [parts for parts in range(1, n + 1) if n % parts == 0]
