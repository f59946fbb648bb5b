"""The operands of a block's products (`score_blocks`): one operation each, since the host has many of them to make."""

import torch
from torch import Tensor

from ..score_blocks import Block


def new_scores(like: Tensor, blocks: tuple[Block, ...]) -> Tensor:
    most = max(block.num_heads * block.num_rows * block.pitch for block in blocks)
    return like.new_empty(most, dtype=torch.float32)


def scores_of(block: Block, s: Tensor) -> Tensor:
    """The scores of a block, `[heads, rows, keys]`."""
    pitch, rows = block.pitch, block.num_rows
    return s.as_strided((block.num_heads, rows, block.num_keys), (rows * pitch, pitch, 1))


def rows_of(block: Block, x: Tensor) -> Tensor:
    """The rows of a block, of `[heads, rows, D]`, contiguous."""
    return part(x, block.head, block.num_heads, block.row, block.num_rows)


def keys_of(block: Block, x: Tensor) -> Tensor:
    """The keys or values of a block, of `[heads, keys, D]`, contiguous."""
    return part(x, block.head, block.num_heads, block.key, block.num_keys)


def part(x: Tensor, head: int, num_heads: int, row: int, num_rows: int) -> Tensor:
    _, rows, width = x.shape
    offset = x.storage_offset() + (head * rows + row) * width
    return x.as_strided((num_heads, num_rows, width), (rows * width, width, 1), offset)


def sums_of(block: Block, whole: bool, sums: Tensor) -> Tensor:
    """The sums of a block's rows: a part of the `whole`, `[heads, rows, D]`, or the beginning of memory `[rows, D]`."""
    if whole:
        return rows_of(block, sums)
    rows, width = block.num_rows, sums.shape[-1]
    return sums.as_strided((block.num_heads, rows, width), (rows * width, width, 1))
