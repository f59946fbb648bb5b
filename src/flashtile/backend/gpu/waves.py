"""Work of the busiest core of a GPU: its tiles, their steps, and those at an edge of the window.

A kernel's program takes a tile of rows (or of keys), visits the blocks of keys (or of rows) that its rows see, one a
step, and then takes the next tile that is left. So a call takes as long as its busiest core.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from ...call.window import Window, key_range, row_range

SAMPLES = 12  # tiles of a head that are looked at; the others lie between them
FILLED = 4  # part of the slots that splits take at least
MOST_ROUNDS = 8  # rounds of tiles, after which the last one counts little
ENDS = 1.5  # a tile's time in steps besides its steps, as far as the busiest core depends on it
ALONE, SHARED = 1.4, 0.3  # factors of a tile's time if fewer of a core's programs run: of the tile, and of each program


class Work(NamedTuple):
    """Work of one core."""

    tiles: float
    steps: float
    edges: float

    def times(self, factor: float) -> "Work":
        return Work(*(factor * x for x in self))


class Tile(NamedTuple):
    """Steps of one tile, and how many are at an edge."""

    steps: float
    edges: float

    @property
    def size(self) -> float:
        return self.steps + ENDS


class Head(NamedTuple):
    """Tiles of a head: a sample of them, each for as many as they are on average."""

    count: int
    sample: tuple[Tile, ...]

    @property
    def total(self) -> Work:
        share = self.count / len(self.sample)
        return Work(
            self.count, share * sum(tile.steps for tile in self.sample), share * sum(tile.edges for tile in self.sample)
        )

    @property
    def longest(self) -> float:
        return max(tile.size for tile in self.sample)

    @property
    def is_even(self) -> bool:
        return len(self.sample) == 1


@lru_cache(maxsize=256)
def row_tiles(window: Window, rows: int, keys: int, block_m: int, block_n: int) -> Head:
    """Tiles of rows, which visit blocks of keys."""
    count = max(1, -(-rows // block_m))
    if window.unlimited:
        return Head(count, (Tile(-(-keys // block_n), 0),))
    found = []
    for n in sampled(count):
        seen = key_range(window, n * block_m, min((n + 1) * block_m, rows) - 1, keys, keys - rows)
        steps = blocks(seen.lo, seen.hi, block_n)
        found.append(Tile(steps, steps - max(0, seen.full_hi // block_n - -(-seen.full_lo // block_n))))
    return Head(count, tuple(found))


@lru_cache(maxsize=256)
def key_tiles(window: Window, rows: int, keys: int, block_m: int, block_n: int) -> Head:
    """Tiles of keys, which visit blocks of rows."""
    count, edge = max(1, -(-keys // block_n)), -(-block_n // block_m)
    if window.unlimited:
        return Head(count, (Tile(-(-rows // block_m), 0),))
    sides = sum(x is not None for x in (window.left, window.right)) or 1
    found = []
    for n in sampled(count):
        lo, hi = row_range(window, n * block_n, min((n + 1) * block_n, keys) - 1, keys - rows)
        steps = blocks(max(lo, 0), min(hi, rows - 1) + 1, block_m)
        found.append(Tile(steps, min(steps, sides * edge)))
    return Head(count, tuple(found))


def sampled(count: int) -> Sequence[int]:
    """Numbers of some of `count` tiles, spread evenly."""
    if count <= SAMPLES:
        return range(count)
    return [(2 * n + 1) * count // (2 * SAMPLES) for n in range(SAMPLES)]


def blocks(lo: float, hi: float, size: int) -> float:
    """Blocks that hold some of the positions from `lo` up to `hi`."""
    return max(0, -(-hi // size) - lo // size) if hi > lo else 0


def busiest(head: Head, heads: float, cores: int, programs: int = 1, at_once: int | None = None) -> Work:
    """The work of the busiest core, each with several programs. Where the tiles of a head are not alike, the longest
    ones of the heads that take turns come first.
    """
    count, total = head.count * heads, head.total.times(heads)
    if count == 0:
        return Work(0, 0, 0)
    mean = total.times(1 / count)  # a tile's
    if head.is_even:
        whole, rest = divmod(ceil(count), cores * programs)
        return mean.times(whole * programs + crowded(-(-rest // cores), programs))
    slots = cores * programs
    if count <= cores:
        return mean.times(head.longest / (mean.steps + ENDS) * crowded(1, programs))
    size = mean.steps + ENDS
    share = count * size / slots  # each program's
    groups = 1 if at_once is None else -(-heads // at_once)
    last = heads - (groups - 1) * at_once if at_once is not None else heads
    # Of the last group, when the tiles of others are taken: half of a tile before their programs are done.
    earlier = 1 - last / heads
    begin = max(0.0, share * earlier - size / 2) if earlier * count >= slots else 0.0
    sizes = sorted((tile.size for tile in head.sample), reverse=True)
    taken = max(share + sizes[-1] / 2, begin + head.longest, *pigeonholes(sizes, count, slots))
    return mean.times(taken / size * programs)


def divided_end(head: Head, heads: int, cores: int, splits: int) -> tuple[Work, int]:
    """The work of the busiest core, if so many programs share each of the tiles that whole waves leave; and how many
    these are. The tiles of a head are alike.
    """
    whole, left = divmod(head.count * heads, cores)
    steps = head.sample[0].steps
    return Work(whole + 1, whole * steps + -(-steps // splits), 0), left


def pigeonholes(sizes: Sequence[float], count: float, slots: int) -> Iterator[float]:
    """Least times of a program that has one tile more than whole rounds: of the longest tiles of these and one more,
    none is shorter than the last one. `sizes` fall, each of as many of `count` tiles.
    """
    for rounds in range(1, min(int((count - 1) // slots), MOST_ROUNDS) + 1):
        yield (rounds + 1) * sizes[int(rounds * slots * len(sizes) / count)]


def crowded(programs: int, most: int) -> float:
    """Time of so many of a core's programs, in those that one takes where all run."""
    if programs == 0:
        return 0
    return most if programs >= most else ALONE + SHARED * programs


def splits_that_fill(choices: Sequence[int], tiles: float, slots: float, most: int) -> list[int]:
    """Numbers of programs, at most so many, that share each of a few tiles and about fill the slots; the largest number
    at least.
    """
    allowed = [n for n in choices if 1 < n <= min(most, 2 * slots / max(tiles, 1))]
    return [n for n in allowed if n >= slots / max(tiles, 1) / FILLED] or allowed[-1:]
