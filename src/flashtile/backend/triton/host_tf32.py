"""PyTorch's products of float32 operands as they are (`host_products`), where one TF32 product is allowed.

Probabilities and gradients of scores are stored over the scores that they are of.
"""

import torch
from torch import Tensor

from ...call.call import Needs
from ..gpu.replay import Recorder
from .score_blocks import Block, Sizes, scores_of

PARTS = False  # what kernels store between products


def prepared(recorder: Recorder, x: Tensor) -> Tensor:
    """`x [B, H, S, D]` as `[B * H, S, D]`, contiguous."""
    return recorder.op(flattened, recorder.op(Tensor.contiguous, x))


def flattened(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def row_chunk(sizes: Sizes) -> int:
    """Rows to whose multiples a block is padded: it is not."""
    return 1


def left(recorder: Recorder, x: Tensor) -> Tensor:
    """An operand, which needs nothing."""
    return x


right = summands = left


def new_probabilities(recorder: Recorder, s: Tensor, sizes: Sizes) -> Tensor:
    """The scores' own memory."""
    return s


def new_weights(
    recorder: Recorder, s: Tensor, dp: Tensor, sizes: Sizes, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The memory of the scores and of their gradients, which serves sums over rows and over keys."""
    return s, None, dp


def multiply_rows(sizes: Sizes, block: Block, s: Tensor, x: Tensor, y: Tensor) -> None:
    """Store the inner products of rows in `s`."""
    torch.bmm(x[block.heads, block.rows], y[block.heads].mT, out=scores_of(sizes, block, s))


def add_over_keys(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Store `alpha * x @ y` for the rows of a block."""
    sums = sums.flatten(0, 1)[block.heads, block.rows]
    torch.baddbmm(sums, scores_of(sizes, block, x), y[block.heads], beta=0, alpha=alpha, out=sums)


def add_over_rows(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Add `alpha * x^T @ y` for the rows of a block to the sums, which hold nothing before the first rows."""
    sums, beta = sums.flatten(0, 1)[block.heads], float(block.row > 0)
    torch.baddbmm(sums, scores_of(sizes, block, x).mT, y[block.heads, block.rows], beta=beta, alpha=alpha, out=sums)
