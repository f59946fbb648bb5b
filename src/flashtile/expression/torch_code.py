"""Programs as torch operations on tiles: what the torch backends run, and what PyTorch can differentiate."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .operations import OPERATIONS
from .program import BOOL, INPUTS, INT32, REAL, emit

DTYPES = {BOOL: torch.bool, INT32: torch.int64}  # one width of integers is enough here


class TorchEmitter:
    """Runs each instruction at once, on tensors that broadcast."""

    def __init__(self, inputs: Sequence[Tensor], tensors: Sequence[Tensor], real: torch.dtype):
        self.inputs: dict[str, Tensor] = dict(zip(INPUTS, inputs, strict=True))
        self.tensors, self.real, self.device = tensors, real, inputs[0].device

    def dtype(self, kind: str) -> torch.dtype:
        return self.real if kind == REAL else DTYPES.get(kind, torch.int64)

    def constant(self, value: float, kind: str) -> Tensor:
        return torch.full((), value, dtype=self.dtype(kind), device=self.device)

    def input(self, name: str) -> Tensor:
        return self.inputs[name]

    def size(self, tensor: int, dimension: int) -> Tensor:
        return self.constant(self.tensors[tensor].shape[dimension], INT32)

    def load(self, tensor: int, indices: Sequence[Tensor]) -> Tensor:
        x = self.tensors[tensor]
        x = x.to(self.real if x.is_floating_point() else torch.bool if x.dtype is torch.bool else torch.int64)
        outside, inside = torch.nan if x.is_floating_point() else False if x.dtype is torch.bool else 0, []
        for index, size in zip(indices, x.shape, strict=True):
            inside.append((index >= 0) & (index < size))
        if not inside:
            return x
        exists = inside[0]
        for condition in inside[1:]:
            exists = exists & condition
        if x.numel() == 0:
            return torch.full(exists.shape, outside, dtype=x.dtype, device=self.device)
        places = [torch.where(exists, index, 0) for index in indices]
        if exists.dim() == 0:  # the host would read an index without dimensions
            return torch.where(exists, x[tuple(index[None] for index in places)][0], outside)
        return torch.where(exists, x[tuple(places)], outside)

    def cast(self, x: Tensor, source: str, kind: str) -> Tensor:
        return x.to(self.dtype(kind))

    def round(self, x: Tensor, dtype: str) -> Tensor:
        return x.to(getattr(torch, dtype)).to(self.real)

    def floordiv(self, x: Tensor, y: Tensor, nonnegative: bool) -> Tensor:
        return x // torch.where(y == 0, 1, y)

    def mod(self, x: Tensor, y: Tensor, nonnegative: bool) -> Tensor:
        return x % torch.where(y == 0, 1, y)

    def __getattr__(self, name: str) -> Any:
        return OPERATIONS[name].torch


def run(program: Any, inputs: Sequence[Tensor], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The results of a program for `(score, b, h, q_idx, k_idx)` that broadcast. Reals have the score's dtype."""
    return emit(program, TorchEmitter(inputs, tensors, inputs[0].dtype))
