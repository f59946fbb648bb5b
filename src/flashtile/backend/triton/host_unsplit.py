"""PyTorch's products of whole operands (`host_products`): of 16 bits, or float32 where one TF32 product is allowed.

Sums are float32. Probabilities and gradients of scores have the inputs' dtype; float32 ones are stored over the scores.
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


def new_probabilities(recorder: Recorder, s: Tensor, sizes: Sizes, dtype: torch.dtype) -> Tensor:
    """Memory for the probabilities of a block in forward: the scores' own if the dtypes agree."""
    return s if s.dtype is dtype else recorder.new(s.new_empty(s.shape, dtype=dtype))


def new_weights(
    recorder: Recorder, s: Tensor, dp: Tensor, sizes: Sizes, dtype: torch.dtype, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for probabilities and gradients of scores in backward; the latter serve sums over rows and over keys."""
    return new_probabilities(recorder, s, sizes, dtype), None, new_probabilities(recorder, dp, sizes, dtype)


def multiply_rows(sizes: Sizes, block: Block, s: Tensor, x: Tensor, y: Tensor) -> None:
    """Store the inner products of rows in `s`."""
    torch.bmm(x[block.heads, block.rows], y[block.heads].mT, torch.float32, out=scores_of(sizes, block, s))


def add_over_keys(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Store `alpha * x @ y` for the rows of a block."""
    sums = sums.flatten(0, 1)[block.heads, block.rows]
    torch.baddbmm(sums, scores_of(sizes, block, x), y[block.heads], torch.float32, beta=0, alpha=alpha, out=sums)


def add_over_rows(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Add `alpha * x^T @ y` for the rows of a block to the sums, which hold nothing before the first rows."""
    sums, beta = sums.flatten(0, 1)[block.heads], float(block.row > 0)
    x, y = scores_of(sizes, block, x).mT, y[block.heads, block.rows]
    torch.baddbmm(sums, x, y, torch.float32, beta=beta, alpha=alpha, out=sums)
