"""Asynchronous copies and mma.sync: `gluon.language.nvidia.ampere`."""

from types import SimpleNamespace
from typing import Any

import torch

from .machine import EmulationError, machine
from .values import Pointer, Shared, Value, unwrap

BYTES = 16  # of one copy of 16-bit numbers


class Copy:
    """A copy to shared memory, which nobody may read or write until it is complete."""

    def __init__(self, target: Shared, pointers: Pointer, mask: Any):
        at = pointers.at(mask)
        selected = torch.ones_like(at, dtype=torch.bool) if mask is None else torch.as_tensor(unwrap(mask))
        if target.shape != list(at.shape) or target.dtype != pointers.base.dtype:
            raise EmulationError(f"copy of {list(at.shape)} {pointers.base.dtype} to {target.shape} {target.dtype}")
        machine().current_task().check_copied("copies to memory", target)
        self.target, self.pointers, self.at, self.selected = target, pointers, at, selected.expand(at.shape)
        if target.dtype.itemsize < 4:
            self.check_aligned()
        target.data.fill_(torch.nan if target.dtype.is_floating_point else -1)  # as fp32 pairs, NaN

    def check_aligned(self) -> None:
        """Require that rows consist of aligned vectors, which exist or not as a whole."""
        size, base = self.target.dtype.itemsize, self.pointers.base
        at, selected = (x.unflatten(-1, (-1, BYTES // size)) for x in (self.at, self.selected))
        adjacent = (at == at[..., :1] + torch.arange(BYTES // size)) | ~selected
        aligned = ((base.data_ptr() + at[..., 0] * size) % BYTES == 0) | ~selected[..., 0]
        if not (adjacent.all() and aligned.all() and torch.equal(selected.all(-1), selected.any(-1))):
            raise EmulationError("the vectors of a copy are not aligned")

    def finish(self) -> None:
        """Masked elements are 0."""
        self.target.data.copy_(torch.where(self.selected, self.pointers.memory()[self.at], 0))


def async_copy_global_to_shared(smem: Shared, pointer: Pointer, mask: Any = None) -> None:
    machine().current_task().copies.append(Copy(smem, pointer, mask))


def commit_group() -> None:
    task = machine().current_task()
    task.copy_groups.append(task.copies)
    task.copies = []


def wait_group(num_outstanding: int = 0) -> None:
    """Wait for all groups but the latest `num_outstanding`."""
    groups = machine().current_task().copy_groups
    for group in groups[: len(groups) - num_outstanding]:
        for copy in group:
            copy.finish()
    del groups[: len(groups) - num_outstanding]
    machine().pause()


def mma_v2(a: Value, b: Value, acc: Value) -> Value:
    """`acc + a @ b` of 16-bit numbers, whose sums are fp32."""
    shapes = [a.shape[0], b.shape[1]] == acc.shape and a.shape[1] == b.shape[0]
    if not shapes or a.dtype != b.dtype or a.dtype.itemsize != 2 or acc.dtype is not torch.float32:
        raise EmulationError(f"product of {a.shape} {a.dtype} and {b.shape} {b.dtype} to {acc.shape} {acc.dtype}")
    return Value(torch.addmm(acc.tensor, a.tensor.float(), b.tensor.float()))


async_copy = SimpleNamespace(
    async_copy_global_to_shared=async_copy_global_to_shared, commit_group=commit_group, wait_group=wait_group
)
