"""Gradients of the tensors that a score_mod reads: how many sums of them there are, and which tasks share one.

Tasks run in any order, so two of them may add to one sum only where they never add to the same element: as where every
load has the head, the sequence or the key as an index. Sums are `[2, sequences, key heads, splits, *shape]`, with the
rounding errors of the totals in the second half (`kernels.sums`); a dimension is 1 where tasks share.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Needs
from ...expression.derivative import Load
from ...expression.program import Program
from .arguments import wanted_gradients
from .variant import TaskSplit, Variant


class CapturedGradient(NamedTuple):
    """The sums of one tensor's gradient."""

    shape: tuple[int, ...]  # the tensor's
    sums: tuple[int, ...]  # sequences, key heads and splits that have sums of their own
    tasks: tuple[int, ...]  # sequences, key heads and splits


class CapturedGradients(NamedTuple):
    """The sums of all requested gradients, by the number of the tensor; `None` for the others."""

    tensors: tuple[CapturedGradient | None, ...]
    num_bytes: int

    def allocate(self, real: torch.dtype) -> list[Tensor]:
        """Sums as kernels see them: of each task, also where tasks share."""
        return [
            torch.zeros((2, *x.sums, *x.shape), dtype=real).expand(2, *x.tasks, *x.shape)
            for x in self.tensors
            if x is not None
        ]

    def sums(self, buffers: list[Tensor]) -> tuple[Tensor | None, ...]:
        """The gradients of the tensors."""
        left = iter(buffers)
        return tuple(None if x is None else total(next(left)[0], x) for x in self.tensors)


def total(parts: Tensor, x: CapturedGradient) -> Tensor:
    """The sum of the parts `[sequences, key heads, splits, *shape]`, without repetitions of those that tasks share."""
    own = parts[tuple(slice(n) for n in x.sums)]
    return own.flatten(0, 2).sum(dim=0)


def captured_gradients(
    call: Call, variant: Variant, needs: Needs, sizes: tuple[int, int], split: TaskSplit
) -> CapturedGradients:
    """The gradients for a backward pass with these tasks. `sizes` are the numbers of sequences and key heads."""
    tensors, wanted = call.tensors.score_mod_tensors, wanted_gradients(needs)
    found: list[CapturedGradient | None] = [None] * len(tensors)
    joined = (split.share_b, split.share_h, False)
    num_bytes = 0
    for number, n in enumerate(wanted):
        assert variant.formula is not None
        first = len(variant.formula.tensors) - len(wanted)
        loads = [x for x in variant.loads if x.tensor == first + number]
        apart = [is_index(variant.formula.program, loads, name) for name in ("b", "h", "k_idx")]
        tasks = (*sizes, split.splits)
        shared = [a or b for a, b in zip(apart, joined, strict=True)]
        sums = tuple(1 if share else size for share, size in zip(shared, tasks, strict=True))
        found[n] = CapturedGradient(tuple(tensors[n].shape), sums, tasks)
        num_bytes += 2 * math.prod(sums) * tensors[n].numel() * (8 if variant.real_dtype == "float64" else 4)
    return CapturedGradients(tuple(found), num_bytes)


def is_index(program: Program, loads: list[Load], name: str) -> bool:
    """Whether all loads have an input as the index of the same dimension, so that they differ where it does."""

    def dimensions(load: Load) -> set[int]:
        instructions = (program.instructions[program.outputs[n]] for n in load.indices)
        return {d for d, x in enumerate(instructions) if (x.op, x.value) == ("input", name)}

    return not loads or bool(set.intersection(*(dimensions(x) for x in loads)))
