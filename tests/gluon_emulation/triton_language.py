"""`triton.language` on CPU tensors: that of Gluon, with whole products and what else only Triton's own kernels use."""

import builtins
from collections.abc import Sequence
from typing import Any

import torch

from .language import *  # noqa: F403
from .machine import EmulationError
from .values import Pointer, Value, as_tensor, unwrap

pointer_type, tuple = Pointer, builtins.tuple  # noqa: A001


def range(*bounds: Any) -> Any:  # noqa: A001
    """Numbers of a loop are scalars of the GPU."""
    return (Value(as_tensor(n)) for n in builtins.range(*(int(x) for x in bounds)))


def dot(a: Value, b: Value, acc: Value | None = None, input_precision: str | None = None) -> Value:
    assert a.dtype == b.dtype
    product = a.tensor.float() @ b.tensor.float()
    return Value(product if acc is None else acc.tensor + product)


def trans(x: Value) -> Value:
    return Value(x.tensor.mT)


def exp(x: Value) -> Value:
    return Value(torch.exp(x.tensor))


def zeros_like(x: Value) -> Value:
    return Value(torch.zeros_like(x.tensor))


def broadcast_to(x: Value, shape: Sequence[int]) -> Value:
    return x.broadcast_to(shape)


def max_constancy(x: Value, values: Sequence[int]) -> Value:
    """Require that so many neighbors are equal, as the compiler is told."""
    for dim, n in enumerate(values):
        blocks = x.tensor.unflatten(dim, (-1, n)).movedim(dim + 1, 0)
        if not torch.equal(blocks, blocks[:1].expand_as(blocks)):
            raise EmulationError(f"neighbors of {x.shape} differ")
    return x


def atomic_or(pointer: Pointer, value: Any, mask: Any, sem: str) -> None:
    at, selected, values = torch.broadcast_tensors(pointer.at(mask), unwrap(mask), as_tensor(unwrap(value)))
    for n, x in zip(at[selected].tolist(), values[selected].tolist(), strict=True):
        pointer.memory()[n] |= x
