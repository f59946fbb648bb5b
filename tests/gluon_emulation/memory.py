"""Reads and writes of global memory through pointers."""

from typing import Any

import torch

from .machine import machine
from .values import Pointer, Value, unwrap


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Value:
    at = pointer.at(mask)
    values = pointer.memory()[at]
    if at.dim() == 0:
        values = values.clone()  # a view
    if mask is not None:
        assert other is not None
        values = torch.where(torch.as_tensor(unwrap(mask)), values, torch.as_tensor(unwrap(other)).to(values.dtype))
    return Value(values)


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    at, memory = pointer.at(mask), pointer.memory()
    values = torch.as_tensor(unwrap(value)).to(memory.dtype).expand(at.shape)
    if mask is not None:
        selected = torch.as_tensor(unwrap(mask)).expand(at.shape)
        at, values = at[selected], values[selected]
    memory[at] = values


def atomic_add(pointer: Pointer, value: Any, mask: Any = None, sem: str = "acq_rel", scope: str = "gpu") -> Value:
    """Add, also to the same element more than once."""
    machine().pause()
    at, memory = pointer.at(mask), pointer.memory()
    old = Value(memory[at].clone())
    selected = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(unwrap(mask)).expand(at.shape)
    values = torch.as_tensor(unwrap(value)).to(memory.dtype).expand(at.shape)
    memory.index_put_((at[selected],), values[selected], accumulate=True)
    return old
