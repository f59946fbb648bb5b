"""PyTorch's products of whole operands (`products`): of 16 bits, or float32 where one TF32 product is allowed.

Sums are float32. Probabilities and gradients of scores have the inputs' dtype; float32 ones are stored over the scores.
"""

import torch
from torch import Tensor

from ....call.call import Needs
from ...gpu.replay import Recorder
from ..score_blocks import Block, Sizes
from .score_views import keys_of, rows_of, scores_of, sums_of

PARTS = False  # what kernels store between products


def prepared(recorder: Recorder, x: Tensor) -> Tensor:
    """`x [B, H, S, D]` as `[B * H, S, D]`, contiguous."""
    return recorder.op(flattened, recorder.op(Tensor.contiguous, x))


def flattened(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def left(recorder: Recorder, x: Tensor) -> Tensor:
    """An operand, which needs nothing."""
    return x


right = left


def summands(recorder: Recorder, x: Tensor, chunk: int) -> Tensor:
    """As `left`."""
    return x


def new_probabilities(recorder: Recorder, s: Tensor, blocks: tuple[Block, ...], dtype: torch.dtype) -> Tensor:
    """Memory for the probabilities of a block in forward: the scores' own if the dtypes agree."""
    return s if s.dtype is dtype else recorder.new(s.new_empty(s.shape, dtype=dtype))


def new_weights(
    recorder: Recorder, s: Tensor, dp: Tensor, sizes: Sizes, blocks: tuple[Block, ...], dtype: torch.dtype, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Memory for probabilities and gradients of scores in backward; the latter serve sums over rows and over keys."""
    p, ds = (new_probabilities(recorder, x, blocks, dtype) for x in (s, dp))
    return p, None, ds


def multiply_rows(block: Block, s: Tensor, x: Tensor, y: Tensor) -> None:
    """Store the inner products of rows and keys in `s`."""
    torch.bmm(rows_of(block, x), keys_of(block, y).mT, torch.float32, out=scores_of(block, s))


def add_over_keys(sizes: Sizes, block: Block, alpha: float, whole: bool, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Store `alpha * x @ y` for the rows of a block."""
    sums = sums_of(block, whole, sums)
    torch.baddbmm(sums, scores_of(block, x), keys_of(block, y), torch.float32, beta=0, alpha=alpha, out=sums)


def add_over_rows(sizes: Sizes, block: Block, alpha: float, sums: Tensor, x: Tensor, y: Tensor) -> None:
    """Add `alpha * x^T @ y` for the rows of a block."""
    sums, beta = keys_of(block, sums), float(not block.empty)
    torch.baddbmm(sums, scores_of(block, x).mT, rows_of(block, y), torch.float32, beta=beta, alpha=alpha, out=sums)
