"""Cotangents that autograd batches (`torch.autograd.grad(..., is_grads_batched=True)`, vectorized jacobians): one
backward pass for each of them.

They are batched by an older mechanism than torch.func's, for which neither operators nor an autograd.Function have
rules.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import private_torch

Gradients = Sequence[Tensor | None]


def is_batched(x: Tensor | None) -> bool:
    """Whether autograd batches a cotangent. No compiler does, and Dynamo warns of the question."""
    return x is not None and not torch.compiler.is_compiling() and bool(private_torch.is_legacy_batchedtensor(x))


def one_by_one(
    gradients: Callable[[Tensor | None, Tensor | None], Gradients], dout: Tensor | None, dlse: Tensor | None
) -> list[Tensor | None]:
    """`gradients(dout, dlse)` of batched cotangents. For the shapes of none, there is one of zeros."""
    level = next((n for n in private_torch.BATCH_LEVELS if any(is_batched_at(x, n) for x in (dout, dlse))), None)
    if level is None:
        raise NotImplementedError("cotangents of attention that are batched twice")
    examples: list[Sequence[Tensor | None]] = [[dout], [dlse]]
    size = 0
    for n, x in enumerate((dout, dlse)):
        if x is not None and is_batched(x):
            each = private_torch.remove_batch_dim(x, level, 1, 0)
            size = len(each)
            examples[n] = each if size > 0 else each.new_zeros((1, *each.shape[1:]))  # type: ignore[assignment]
    found = [gradients(*(x[n % len(x)] for x in examples)) for n in range(max(size, 1))]
    return [
        None if parts[0] is None else private_torch.add_batch_dim(torch.stack(parts)[:size], 0, level)  # type: ignore[arg-type]
        for parts in zip(*found, strict=True)
    ]


def is_batched_at(x: Tensor | None, level: int) -> bool:
    """Whether a tensor is batched at a level alone."""
    return x is not None and is_batched(x) and not is_batched(private_torch.remove_batch_dim(x, level, 1, 0))
