"""Visibility of blocks by a mask's formula (`expression.blocks`) as source text of a device function of Triton:

    def visibility(b, h, q_idx, k_idx, captured): ... return (ALWAYS, EVER)

for the positions of one block of rows `[M]` and of several blocks of keys `[LANES, BLOCKS, N / LANES]`. The evaluation
is the same as in `expression.blocks`, on names of values in the text in place of tensors: so the rules of intervals
are written once.

For many keys there are two functions. The first one returns all that visibility takes of blocks of keys, int64, once
for all blocks of rows; the second one is `visibility` with `k_idx = (pointers, stride, exist)` of these numbers.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ...expression.blocks import intervals
from ...expression.blocks.analysis import KEY, UNIFORM, analysis
from ...expression.blocks.evaluation import Environment, Evaluation
from ...expression.blocks.intervals import Interval
from ...expression.formula import Formula
from ...expression.program import BOOL, INT32, REAL
from .formula import Writer

LITERAL = 2**31  # from which a number needs its type
BINARY = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "floordiv": "floordiv({}, {}, False)",
    "mod": "mod({}, {}, False)", "and": "{} & {}", "or": "{} | {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}",
    "ge": "{} >= {}", "eq": "{} == {}", "ne": "{} != {}", "minimum": "tl.minimum({}, {})",
    "maximum": "tl.maximum({}, {})",
}  # fmt: skip
TO_WORD = {  # by the dtype of a value
    torch.int64: "{}", torch.bool: "{}.to(tl.int64)", torch.float32: "{}.to(tl.int32, bitcast=True).to(tl.int64)",
}  # fmt: skip
FROM_WORD = {
    torch.int64: "{}", torch.bool: "{} != 0", torch.float32: "{}.to(tl.int32).to(tl.float32, bitcast=True)",
}  # fmt: skip
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
Line = Callable[[str], str]  # adds a value's text, and returns its name


class UnsupportedError(Exception):
    """A formula whose blocks need more than intervals of positions."""


class Symbol:
    """A value in the text, with as much of a tensor as `intervals` uses. Integers have 64 bits."""

    def __init__(self, name: str, dtype: torch.dtype, line: Line):
        self.name, self.dtype, self.line = name, dtype, line

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, given: tuple[Any, ...] = (), more: Any = None) -> Any:
        name = function.__name__.strip("_").removeprefix("bitwise_")
        like = next(x for x in given if isinstance(x, Symbol))
        if name in BINARY or name.removeprefix("r") in ("and", "or"):
            return like.binary(name if name in BINARY else name.removeprefix("r"), *given)
        if name == "where":
            condition, x, y = given
            kept = next(z for z in (x, y, condition) if isinstance(z, Symbol))
            return like.new(f"tl.where({text(condition)}, {text(x)}, {text(y)})", kept.dtype)
        if name == "sign":
            return like.new(f"tl.where({like.name} > 0, 1, tl.where({like.name} < 0, -1, 0)).to(tl.int64)", like.dtype)
        if name == "zeros_like":
            return like.new(f"{like.name} * 0", like.dtype)
        raise NotImplementedError(name)

    def new(self, line: str, dtype: torch.dtype) -> "Symbol":
        return Symbol(self.line(line), dtype, self.line)

    def binary(self, op: str, x: Any, y: Any) -> "Symbol":
        dtype = torch.bool if op in COMPARISONS else self.dtype
        return self.new(BINARY[op].format(text(x), text(y)), dtype)

    def __neg__(self) -> "Symbol":
        return self.new(f"-{self.name}", self.dtype)

    def __invert__(self) -> "Symbol":
        return self.new(f"~{self.name}", self.dtype)

    def __hash__(self) -> int:
        return id(self)

    def abs(self) -> "Symbol":
        return self.new(f"tl.abs({self.name})", self.dtype)

    def clamp(self, min: int) -> "Symbol":  # noqa: A002 - as of tensors
        return self.new(f"tl.maximum({self.name}, {min})", self.dtype)

    def double(self) -> "Symbol":
        return self.new(f"{self.name}.to(tl.float64)", torch.float64)

    def to(self, dtype: str) -> "Symbol":
        return self.new(f"{self.name}.to(tl.{dtype})", torch.float32 if dtype == "float32" else torch.int64)


def add_operators() -> None:
    for op in ("add", "sub", "mul", "floordiv", "mod", "and", "or", *COMPARISONS):
        setattr(Symbol, f"__{op}__", lambda self, other, op=op: self.binary(op, self, other))
        if op not in COMPARISONS:
            setattr(Symbol, f"__r{op}__", lambda self, other, op=op: self.binary(op, other, self))


def text(x: Any) -> str:
    """The text of an operand."""
    if isinstance(x, Symbol):
        return x.name
    value = x.item() if isinstance(x, torch.Tensor) else x
    if isinstance(value, bool):
        return f"tl.full([], {value}, tl.int1)"
    return f"tl.full([], {value}, tl.int64)" if isinstance(value, int) and abs(value) >= LITERAL else repr(value)


class SymbolicEvaluation(Evaluation):
    """The evaluation of a formula on names. With `stored`, blocks of keys have summaries in memory."""

    def __init__(self, formula: Formula, writer: Writer, *, stored: bool = False):  # no tensors: not the base class's
        self.of, self.tensors, self.emitter = analysis(formula), (), writer  # type: ignore[assignment]
        self.instructions = self.of.program.instructions
        self.values, self.summaries = {}, {}
        nothing = torch.zeros((), dtype=torch.int64)
        self.blocks = SimpleNamespace(b=nothing)  # type: ignore[assignment]
        self.stored = stored
        self.of_keys: list[Interval] = []  # summaries of blocks of keys, in the order in which they are needed

    def line(self, value: str) -> str:
        return self.emitter.line(value).name  # type: ignore[attr-defined]

    def symbol(self, value: str, dtype: torch.dtype) -> Symbol:
        return Symbol(self.line(value), dtype, self.line)

    def value(self, n: int) -> Any:
        return None if self.stored and self.of.stages[n] == KEY else super().value(n)

    def summary(self, n: int) -> Interval:
        if self.of.stages[n] != KEY:
            return self.summary_of_positions(n)
        found = self.stored_summary(n) if self.stored else self.summary_of_positions(n)
        self.of_keys.append(found)
        return found

    def stored_summary(self, n: int) -> Interval:
        """The next two numbers in memory."""
        kind, first = self.instructions[n].kind, 2 * len(self.of_keys)
        dtype = {BOOL: torch.bool, REAL: torch.float32}.get(kind, torch.int64)
        loads = (f"tl.load(k_idx[0] + {i} * k_idx[1], mask=k_idx[2], other=0)" for i in (first, first + 1))
        return Interval(*(self.symbol(FROM_WORD[dtype].format(x), dtype) for x in loads))  # type: ignore[arg-type]

    def words(self) -> list[str]:
        """The summaries of blocks of keys as int64."""
        return [TO_WORD[x.dtype].format(x.name) for both in self.of_keys for x in both]  # type: ignore[attr-defined]

    def summary_of_positions(self, n: int) -> Interval:
        kind, name, stage = self.instructions[n].kind, self.values[n].name, self.of.stages[n]  # type: ignore[attr-defined]
        if kind == BOOL:
            if stage == UNIFORM:
                return intervals.point(self.symbol(name, torch.bool))  # type: ignore[arg-type]
            texts = (f"{f}({name}.to(tl.int32)) != 0" for f in ("least", "largest"))
            return Interval(*(self.symbol(x, torch.bool) for x in texts))  # type: ignore[arg-type]
        dtype, suffix = (torch.float32, "") if kind == REAL else (torch.int64, ".to(tl.int64)")
        if stage == UNIFORM:
            return intervals.point(self.symbol(f"{name}{suffix}", dtype))  # type: ignore[arg-type]
        if kind == REAL:
            texts = (f"{f}_real({name})" for f in ("least", "largest"))
        else:
            texts = (f"{f}({name}){suffix}" for f in ("least", "largest"))
        return Interval(*(self.symbol(x, dtype) for x in texts))  # type: ignore[arg-type]

    def cast(self, x: Interval, source: str, kind: str) -> Interval | None:
        if kind == BOOL or (source == REAL and kind != REAL):
            return super().cast(x, source, kind)
        low, high = (y.to("int64") if source == BOOL else y for y in x)  # type: ignore[call-overload]
        if kind == REAL:
            return Interval(low.to("float32"), high.to("float32"))  # type: ignore[call-overload]
        if kind == INT32:
            return Interval(*(y.to("int32").to("int64") for y in (low, high)))  # type: ignore[call-overload]
        return Interval(low, high)

    def load(self, n: int, known: Environment) -> Interval:
        raise UnsupportedError


def visibility_source(formula: Formula, wide: bool, *, stored: bool = False) -> str | None:
    """The function's text; `None` if an element of a captured tensor is read for each pair. `wide`: offsets into
    captured tensors have 64 bits. With `stored`, the code of the second of two functions.
    """
    writer = Writer(formula.tensors, "tl", wide)
    try:
        always, ever = SymbolicEvaluation(formula, writer, stored=stored).result()
    except UnsupportedError:
        return None
    return function_source("visibility", writer, [text(always), text(ever)])


def summaries_source(formula: Formula, wide: bool) -> tuple[str, int] | None:
    """The text of the first of two functions, and how many numbers it returns; `None` if there are none."""
    writer = Writer(formula.tensors, "tl", wide)
    evaluation = SymbolicEvaluation(formula, writer)
    try:
        evaluation.result()
    except UnsupportedError:
        return None
    words = evaluation.words()
    return (function_source("summaries", writer, words), len(words)) if words else None


def function_source(name: str, writer: Writer, results: Sequence[str]) -> str:
    body = "".join(f"    {line}\n" for line in writer.lines)
    return f"def {name}(b, h, q_idx, k_idx, captured):\n{body}    return ({', '.join(results)})\n"


add_operators()
