"""Blocks of heads and rows whose scores are in memory at a time, where PyTorch multiplies."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Call

UNIT = 16  # of strides, in elements
SCORES = 2**25  # of a block: 320 MiB of scores and probabilities in forward, 832 MiB with gradients in backward
# Terms that matrix units add before a sum is rounded: each 16 are truncated (docs/contract.md allows 32 units, and 64
# times half a unit of half the sum is half of that).
CHUNK = 1024


class Sizes(NamedTuple):
    heads: int  # of all sequences
    rows: int
    keys: int

    @property
    def padded_keys(self) -> int:
        return round_up(self.keys, chunk_of(self.keys))

    @property
    def pitch(self) -> int:
        """Elements from row to row of scores."""
        return round_up(self.keys, UNIT)

    @property
    def block(self) -> tuple[int, int]:
        """Heads and rows of a block, whole chunks of rows unless it has all."""
        rows = max(CHUNK, SCORES // self.padded_keys // CHUNK * CHUNK)
        rows = min(rows, self.rows)
        return max(1, min(SCORES // (rows * self.padded_keys), self.heads)), rows

    def blocks(self) -> Iterator["Block"]:
        heads, rows = self.block
        for h in range(0, self.heads, heads):
            for r in range(0, self.rows, rows):
                yield Block(h, min(heads, self.heads - h), r, min(rows, self.rows - r))


class Block(NamedTuple):
    """Heads and rows whose scores are in memory together."""

    head: int
    num_heads: int
    row: int
    num_rows: int

    @property
    def heads(self) -> slice:
        return slice(self.head, self.head + self.num_heads)

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.num_rows)


def round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def chunk_of(n: int) -> int:
    return min(CHUNK, round_up(n, UNIT))


def sizes_of(call: Call) -> Sizes:
    q, k = call.tensors.q, call.tensors.k
    return Sizes(q.shape[0] * q.shape[1], q.shape[2], k.shape[2])


def new_scores(like: Tensor, sizes: Sizes) -> Tensor:
    heads, rows = sizes.block
    return like.new_empty(heads * rows * sizes.pitch, dtype=torch.float32)


def scores_of(sizes: Sizes, block: Block, s: Tensor) -> Tensor:
    """The scores of a block, `[heads, rows, keys]`."""
    shape = block.num_heads, block.num_rows, sizes.pitch
    return s[: math.prod(shape)].view(shape)[..., : sizes.keys]
