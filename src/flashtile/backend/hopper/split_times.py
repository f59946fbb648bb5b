"""Time of tiles whose steps are split among programs, in steps: blocks of keys of a tile of rows, or the reverse."""

MAX_SPLITS = 32
TILE_BLOCKS = 2.0  # time of a tile's prologue and epilogue
COMBINE_BLOCKS = 4.0  # time of the launch that merges the splits
COMBINE_BYTES = 2**22  # of partial results that are merged in the time of a step


def fastest(tiles: int, blocks: int, bytes_per_split: int, cores: int, slack: float = 1.0) -> int:
    """The fewest splits that take at most `slack` times the least time."""
    choices = range(1, max(1, min(MAX_SPLITS, blocks)) + 1)
    times = [time(splits, tiles, blocks, bytes_per_split, cores) for splits in choices]
    return next(splits for splits, taken in zip(choices, times, strict=True) if taken <= slack * min(times))


def time(splits: int, tiles: int, blocks: int, bytes_per_split: int, cores: int) -> float:
    """Time of whole waves of `tiles` with `blocks` steps each, and of the sum of the splits' results."""
    tile = cdiv(blocks, splits) + TILE_BLOCKS
    merging = COMBINE_BLOCKS + splits * bytes_per_split / COMBINE_BYTES if splits > 1 else 0
    return cdiv(tiles * splits, cores) * tile + merging


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def divisors(n: int) -> list[int]:
    """The numbers of programs that share a group of `n` heads evenly."""
    return [parts for parts in range(1, n + 1) if n % parts == 0]
