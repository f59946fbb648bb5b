"""Visibility of whole blocks of pairs: hidden, partly visible, or full.

Instructions of rows alone or keys alone are computed for every position, as the kernels do, and then summarized by
their minimum and maximum in each block. Instructions of pairs are computed on these intervals. So the work is O(rows +
keys + blocks), whatever the mask is, all of it in torch operations on the device of the tensors: the host reads no
value, and no shape depends on one.

A block is never called hidden that has a visible pair, nor full that has a hidden one. Reals that are results of
arithmetic count as unknown, since kernels round them differently.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..formula import Formula
from ..program import BOOL, REAL, emit_instruction
from ..torch_code import TorchEmitter
from . import intervals
from .analysis import ROW, UNIFORM, Analysis, Conjunction, analysis, depends_on, spread
from .intervals import Interval
from .loads import Index, load_interval

HIDDEN, PARTIAL, FULL = 0, 1, 2
Environment = dict[int, Interval | None]  # intervals of instructions of pairs; `None` for a number that may be any


class Blocks(NamedTuple):
    """The pairs of a call, in blocks. In each block, positions ascend by steps of 1 or 0."""

    b: Tensor  # [B], numbers of sequences
    h: Tensor  # [H], numbers of heads
    rows: Tensor  # [blocks of rows, rows of a block], positions
    keys: Tensor  # [blocks of keys, keys of a block]


def positions(first: int, length: int, size: int, device: torch.device) -> Tensor:
    """The positions from `first` on in blocks of one size, `[blocks, size]`; the last one is repeated to fill its
    block.
    """
    places = torch.arange(-(-length // size) * size, device=device).clamp(max=max(length - 1, 0))
    return (places + first).view(-1, size)


@torch.no_grad()
def block_visibility(formula: Formula, tensors: Sequence[Tensor], blocks: Blocks, real: torch.dtype) -> Tensor:
    """Whether each block is HIDDEN, PARTIAL or FULL, as uint8 `[B | 1, H | 1, blocks of rows, blocks of keys]`: one
    entry for all sequences if the mask does not depend on `b`, and so for heads. `tensors` are its formula's;
    `real` is the accumulation dtype.
    """
    visible = Evaluation(analysis(formula), tensors, blocks, real).result()
    shape = (
        len(blocks.b) if depends_on(formula, "b") else 1,
        len(blocks.h) if depends_on(formula, "h") else 1,
        len(blocks.rows),
        len(blocks.keys),
    )
    return (visible.low.to(torch.uint8) + visible.high).expand(shape)


class Evaluation:
    """One evaluation of a formula on blocks."""

    def __init__(self, of: Analysis, tensors: Sequence[Tensor], blocks: Blocks, real: torch.dtype):
        self.of, self.tensors, self.blocks = of, tensors, blocks
        self.instructions = of.program.instructions
        score = torch.zeros((), dtype=real, device=blocks.b.device)
        rows, keys = blocks.rows.reshape(-1, 1), blocks.keys.reshape(-1)
        indices = (blocks.b[:, None, None, None], blocks.h[:, None, None], rows, keys)
        self.emitter = TorchEmitter((score, *indices), tensors, real)
        self.values: dict[int, Tensor] = {}  # values of instructions that are computed for every position
        self.summaries: dict[int, Interval] = {}  # their intervals in each block

    def result(self) -> Interval:
        """Whether the pairs of each block are visible, always and ever."""
        known: Environment = {}
        for n in range(len(self.instructions)):
            if self.of.by_position[n]:
                self.values[n] = self.value(n)
            elif n in self.of.conjunctions:
                known[n] = self.conjunction(self.of.conjunctions[n], known)
            else:
                known[n] = self.operation(n, known)
        return self.condition(self.of.program.outputs[0], known)

    def value(self, n: int) -> Tensor:
        """The values of an instruction that is computed for every position."""
        x = self.instructions[n]
        return emit_instruction(x, [self.values[m] for m in x.operands], self.kinds(n), self.emitter)  # type: ignore[no-any-return]

    def kinds(self, n: int) -> list[str]:
        """The kinds of an instruction's operands."""
        return [self.instructions[m].kind for m in self.instructions[n].operands]

    def interval(self, n: int, known: Environment) -> Interval | None:
        """The interval of an instruction in each block."""
        if not self.of.by_position[n]:
            return known[n]
        if n not in self.summaries:
            self.summaries[n] = self.summary(n)
        return self.summaries[n]

    def condition(self, n: int, known: Environment) -> Interval:
        """The interval of a truth value."""
        found = self.interval(n, known)
        return intervals.anything(self.blocks.b) if found is None else found

    def summary(self, n: int) -> Interval:
        """The interval of what is computed for every position."""
        x, stage = self.values[n], self.of.stages[n]
        if stage == UNIFORM:
            return intervals.point(x)
        dim, sizes = (-2, self.blocks.rows.shape) if stage == ROW else (-1, self.blocks.keys.shape)
        parts = x.unflatten(dim, sizes)
        if x.dtype is torch.bool:
            return Interval(parts.all(dim=dim), parts.any(dim=dim))
        return Interval(*torch.aminmax(parts, dim=dim))

    def operation(self, n: int, known: Environment) -> Interval | None:
        """The interval of an instruction of pairs."""
        x, kinds = self.instructions[n], self.kinds(n)
        if x.op == "load":
            return self.load(n, known)
        if x.kind == BOOL and all(kind == BOOL for kind in kinds):
            conditions = [self.condition(m, known) for m in x.operands]
            return intervals.chosen(*conditions) if x.op == "where" else intervals.LOGIC[x.op](*conditions)
        operands = [self.condition(x.operands[0], known)] if kinds[0] == BOOL else []
        for m in x.operands[len(operands) :]:
            found = self.interval(m, known)
            if found is None:
                return None
            operands.append(found)
        if x.op == "cast":
            return self.cast(operands[0], kinds[0], x.kind)
        if x.op in ("eq", "ne"):
            equal = self.equality(n, operands, known)
            return equal if x.op == "eq" else intervals.no(equal)
        if x.op in intervals.COMPARISONS:
            return intervals.COMPARISONS[x.op](*operands)
        if x.kind == REAL:
            return None
        if x.op == "where":
            return intervals.chosen(*operands)
        if x.op not in intervals.ARITHMETIC:
            return None
        result = intervals.ARITHMETIC[x.op](*operands)
        return intervals.guarded(x.op, result, tuple(operands)) if self.of.wraps[n] else result

    def cast(self, x: Interval, source: str, kind: str) -> Interval | None:
        if kind == BOOL:
            zero = intervals.point(torch.zeros_like(x.low))
            return intervals.ne(x, zero)
        if source == REAL and kind != REAL:
            return None
        return Interval(*(self.emitter.cast(y, source, kind) for y in x))  # which is monotonic

    def equality(self, n: int, operands: list[Interval], known: Environment) -> Interval:
        """Whether two operands are equal. For a remainder that is exact, although the remainders in a block may be
        no interval.
        """
        equal = intervals.eq(*operands)
        for m, other in zip(self.instructions[n].operands, reversed(operands), strict=True):
            x = self.instructions[m]
            if x.op == "mod" and not self.of.by_position[m]:
                divided, divisor = (self.interval(i, known) for i in x.operands)
                if divided is not None and divisor is not None:
                    ever = intervals.has_remainder(divided, divisor, other)
                    equal = Interval(equal.low, equal.high & ever)
        return equal

    def load(self, n: int, known: Environment) -> Interval:
        """The elements of a tensor that a block reads."""
        x, indices = self.instructions[n], []
        for m in x.operands:
            stage = self.of.stages[m]
            length = self.blocks.rows.shape[1] if stage == ROW else self.blocks.keys.shape[1]
            width = spread(self.of, m, length) if self.of.by_position[m] else None
            indices.append(Index(self.interval(m, known), stage, None if width is None else width + 1))
        tensor = self.tensors[x.value]
        if tensor.dtype is not torch.bool:
            tensor = tensor.to(self.emitter.dtype(x.kind))
        return load_interval(tensor, indices, torch.nan if x.kind == REAL else 0)

    def conjunction(self, x: Conjunction, known: Environment) -> Interval:
        """A conjunction of conditions; some bound what the others read: only values within those bounds can
        make it true.
        """
        conditions = [self.condition(n, known) for n in x.conditions]
        changed: Environment = {}
        possible = torch.ones((), dtype=torch.bool, device=self.blocks.b.device)
        for bound in x.bounds:
            own = changed.get(bound.instruction, known[bound.instruction])
            other = self.interval(bound.other, known)
            if own is not None and other is not None:
                changed[bound.instruction] = narrowed = intervals.narrowed(bound.comparison, own, other)
                possible = possible & (narrowed.low <= narrowed.high)
        again = known | changed
        for n in range(min(changed, default=0), max(x.conditions) + 1):
            depends = any(m in changed for m in self.instructions[n].operands)
            if depends and n not in changed and not self.of.by_position[n]:
                again[n] = changed[n] = self.operation(n, again)
        result = conditions[0]
        for condition in conditions[1:]:
            result = intervals.both(result, condition)
        for n in x.conditions:
            if n in changed:
                possible = possible & self.condition(n, again).high
        return Interval(result.low, result.high & possible)
