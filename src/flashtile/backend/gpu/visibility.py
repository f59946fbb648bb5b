"""Visibility of blocks by a mask's formula (`expression.blocks`) as source text of a device function of Triton:

    def visibility(b, h, q_idx, k_idx, captured): ... return (ALWAYS, EVER)

for the positions of one block of rows `[M]` and of several blocks of keys `[LANES, BLOCKS, N / LANES]`. The evaluation
is that of `expression.blocks`, on names of values in the text in place of tensors: so the rules of intervals are
written once.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ...expression.blocks import intervals
from ...expression.blocks.analysis import UNIFORM, analysis
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
    """The evaluation of a formula on names."""

    def __init__(self, formula: Formula, writer: Writer):  # no tensors: not that of the base class
        self.of, self.tensors, self.emitter = analysis(formula), (), writer  # type: ignore[assignment]
        self.instructions = self.of.program.instructions
        self.values, self.summaries = {}, {}
        nothing = torch.zeros((), dtype=torch.int64)
        self.blocks = SimpleNamespace(b=nothing)  # type: ignore[assignment]

    def line(self, value: str) -> str:
        return self.emitter.line(value).name  # type: ignore[attr-defined]

    def symbol(self, value: str, dtype: torch.dtype) -> Symbol:
        return Symbol(self.line(value), dtype, self.line)

    def summary(self, n: int) -> Interval:
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


def visibility_source(formula: Formula, wide: bool) -> str | None:
    """The function's text; `None` if an element of a captured tensor is read for each pair. `wide`: offsets into
    captured tensors have 64 bits.
    """
    writer = Writer(formula.tensors, "tl", wide)
    try:
        always, ever = SymbolicEvaluation(formula, writer).result()
    except UnsupportedError:
        return None
    body = "".join(f"    {line}\n" for line in writer.lines)
    return f"def visibility(b, h, q_idx, k_idx, captured):\n{body}    return ({text(always)}, {text(ever)})\n"


add_operators()
