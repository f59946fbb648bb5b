"""The operators under torch.vmap: each example is a call of its own."""

from collections.abc import Callable
from typing import Any

import torch


def one_by_one(op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """An operator under torch.vmap: each example is a call of its own, with the positions and dropout of that call. For
    the shapes of no results, there is an example of zeros.
    """
    size = info.batch_size

    def example(x: Any, dim: Any, n: int) -> Any:
        if isinstance(dim, list | tuple):
            return [example(part, d, n) for part, d in zip(x, dim, strict=True)]
        if dim is None:
            return x
        return x.select(dim, n) if size > 0 else x.new_zeros((*x.shape[:dim], *x.shape[dim + 1 :]))

    def stacked(*parts: Any) -> Any:
        if isinstance(parts[0], list):
            return [stacked(*p) for p in zip(*parts, strict=True)]
        return torch.stack(parts) if size > 0 else parts[0].new_empty((0, *parts[0].shape))

    def dims(x: Any) -> Any:
        return [0] * len(x) if isinstance(x, list) else 0

    results = [
        op(*(example(x, dim, n) for x, dim in zip(arguments, in_dims, strict=True))) for n in range(max(size, 1))
    ]
    outputs = tuple(stacked(*parts) for parts in zip(*results, strict=True))
    return outputs, tuple(dims(x) for x in outputs)


def one_tangent_by_one(op: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> Any:
    """As `one_by_one`. Examples that differ in tangents alone share `out` and `lse`."""
    outputs, dims = one_by_one(op, info, in_dims, *arguments)
    batched = [dim for of in in_dims[2:] for dim in (of if isinstance(of, list | tuple) else [of])]
    if info.batch_size == 0 or any(dim is not None for dim in batched):
        return outputs, dims
    out, lse, *tangents = outputs
    return (out[0], lse[0], *tangents), (None, None, 0, 0)
