"""Blocks of heads, rows and visible keys whose scores are in memory at a time, where PyTorch multiplies.

A row of these blocks is a position and a query head of a group, `position * group + head`: the heads that share keys
are rows of one product, and keys are not repeated.
"""

import functools
from typing import NamedTuple

from ...call.call import Call
from ...call.window import UNLIMITED, Window, key_range

UNIT = 16  # unit of strides and of the first key, in elements
ROWS = 128  # rows of a product's tile: blocks of a window begin at multiples of them
SCORES = 2**25  # scores of a block: 320 MiB with probabilities in forward, 832 MiB with gradients in backward
# What a block takes for its launches, and for each key, whose gradients it adds to, in the time of scores: smaller
# blocks skip more hidden pairs (docs/journal/2026-11-26-wide-heads.md).
BLOCK_COST, KEY_COST = 3 * 2**20, 160
# Terms that matrix units add before a sum is rounded: each 16 are truncated (docs/contract.md allows 32 units, and 64
# times half a unit of half the sum is half of that).
CHUNK = 1024


class Block(NamedTuple):
    """Key heads of all sequences, their rows and the keys that these see, whose scores are in memory together."""

    head: int
    num_heads: int
    row: int
    num_rows: int
    key: int
    num_keys: int
    padded_keys: int  # whole chunks of sums over keys
    empty: bool  # whether the sums over rows of these heads hold nothing yet

    @property
    def heads(self) -> slice:
        return slice(self.head, self.head + self.num_heads)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.num_rows)

    @property
    def keys(self) -> slice:
        return slice(self.key, self.key + self.num_keys)

    @property
    def pitch(self) -> int:
        """Elements from row to row of scores."""
        return round_up(self.num_keys, UNIT)


class Sizes(NamedTuple):
    """The sizes of a call, and the units of its blocks: positions, and keys that a sum adds at once."""

    heads: int  # key heads of all sequences
    group: int  # query heads that share a key head
    seqlen: int
    keys: int
    window: Window
    first: int  # the first row's position in the whole sequence, and that of the first key
    first_key: int
    diagonal: int
    positions: int
    keys_at_once: int

    @property
    def rows(self) -> int:
        """Rows of a key head."""
        return self.seqlen * self.group

    @property
    def row_chunk(self) -> int:
        """Rows that a sum adds at once. Blocks have multiples of it, unless they have all rows."""
        return min(self.positions * self.group, round_up(self.rows, UNIT))

    def visible(self, start: int, stop: int) -> tuple[int, int]:
        """The keys that some of the positions see, in units; at least one unit."""
        if self.window == UNLIMITED:
            return 0, self.keys
        seen = key_range(
            self.window, start + self.first, stop - 1 + self.first, self.keys, self.diagonal, self.first_key
        )
        unit = self.keys_at_once
        lo = min(seen.lo, self.keys - 1) // unit * unit
        return lo, min(round_up(max(seen.hi, lo + 1), unit), self.keys)

    def ranges(self, positions: int) -> list[tuple[int, int, int, int]]:
        """Positions and keys of all blocks of a number of positions."""
        starts = range(0, self.seqlen, positions)
        ends = [(start, min(start + positions, self.seqlen)) for start in starts]
        return [(*rows, *self.visible(*rows)) for rows in ends]

    def padded(self, num_keys: int) -> int:
        return round_up(num_keys, self.keys_at_once)

    def heads_of(self, ranges: list[tuple[int, int, int, int]]) -> int:
        """Heads whose scores in each of these blocks fit into memory together."""
        most = max((stop - start) * self.padded(hi - lo) for start, stop, lo, hi in ranges)
        return max(1, min(SCORES // (self.group * most), self.heads))

    def cost(self, ranges: list[tuple[int, int, int, int]]) -> int:
        """The time of blocks."""
        scores = sum(((stop - start) * self.group + KEY_COST) * (hi - lo) for start, stop, lo, hi in ranges)
        return scores * self.heads + BLOCK_COST * len(ranges) * -(-self.heads // self.heads_of(ranges))


@functools.lru_cache(maxsize=256)
def blocks_of(sizes: Sizes) -> tuple[Block, ...]:
    """The blocks of a call. Without a window they have as many positions as fit into memory."""
    unit = sizes.positions
    most = SCORES // (sizes.group * sizes.padded(sizes.keys)) // unit * unit
    candidates = [min(max(most, unit), sizes.seqlen)]
    if sizes.window != UNLIMITED:
        candidates += [n for n in (unit << shift for shift in range(20)) if n < candidates[0]]
    ranges = min((sizes.ranges(n) for n in candidates), key=sizes.cost)
    ranges.sort(key=lambda x: x[2] - x[3])  # a block of all keys first: its sums need no zeros before
    heads, group, blocks = sizes.heads_of(ranges), sizes.group, []
    for head in range(0, sizes.heads, heads):
        num_heads = min(heads, sizes.heads - head)
        for n, (start, stop, lo, hi) in enumerate(ranges):
            empty = n == 0 and hi - lo == sizes.keys
            rows = start * group, (stop - start) * group
            blocks.append(Block(head, num_heads, *rows, lo, hi - lo, sizes.padded(hi - lo), empty))
    return tuple(blocks)


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def chunk_of(n: int) -> int:
    return min(CHUNK, round_up(n, UNIT))


def sizes_of(call: Call, *, parts: bool) -> Sizes:
    (batch, heads_q, seqlen, _), (_, heads, keys, _), s = call.tensors.q.shape, call.tensors.k.shape, call.settings
    sizes = new_sizes(batch, (heads_q, heads), (seqlen, keys), s.window, parts=parts)
    return sizes._replace(first=s.i0, first_key=s.j0, diagonal=sizes.diagonal + s.diagonal)


def new_sizes(batch: int, heads: tuple[int, int], lengths: tuple[int, int], window: Window, *, parts: bool) -> Sizes:
    """The sizes of queries and keys. With `parts` of numbers, sums add whole chunks of rows and keys."""
    group, (seqlen, keys) = heads[0] // heads[1], lengths
    positions, keys_at_once = max((CHUNK if parts else ROWS) // group, 1), chunk_of(keys) if parts else UNIT
    return Sizes(batch * heads[1], group, seqlen, keys, window, 0, 0, keys - seqlen, positions, keys_at_once)
