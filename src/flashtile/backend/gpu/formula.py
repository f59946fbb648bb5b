"""Formulas as source text of a device function, in the language of Triton and Gluon.

    def NAME(score, b, h, q_idx, k_idx, captured): ... return (OUTPUT, ...)

That of a mask has no score. Indices have any shapes that broadcast to the score's: a number, rows `[M, 1]`, keys
`[1, N]`, or transposed. A value has the shape of what it depends on, so that an element of a captured tensor that
depends on the head alone is one load.
`captured` has the data pointer, the sizes and the strides of each captured tensor, one after another.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...expression.derivative import Load
from ...expression.formula import Formula
from ...expression.program import BOOL, INPUTS, INT32, INT64, REAL, TensorType, emit

DTYPES = {REAL: "float32", INT32: "int32", INT64: "int64"}
OPERATIONS = {  # formats of operands; {language} is the module of the language
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "neg": "-{0}",
    "abs": "{language}.abs({0})",
    "sign": "{language}.where({0} > 0, 1, {language}.where({0} < 0, -1, {0}))",
    "minimum": "{language}.minimum({0}, {1}, propagate_nan=KEEP_NAN)",
    "maximum": "{language}.maximum({0}, {1}, propagate_nan=KEEP_NAN)",
    "where": "{language}.where({0}, {1}, {2})",
    "sqrt": "{language}.sqrt({0})", "rsqrt": "{language}.rsqrt({0})", "log": "{language}.log({0})",
    "erf": "{language}.erf({0})", "floor": "{language}.floor({0})",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "and_": "{0} & {1}", "or_": "{0} | {1}", "xor": "{0} ^ {1}", "not_": "~{0}",
}  # fmt: skip
# Names that the backend defines, as it does floordiv, mod, inside, load_pairs and KEEP_NAN.
FUNCTIONS = ("exp", "tanh", "sigmoid")
LOADED = {  # dtypes of captured tensors, and the kind of their elements
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), REAL),
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), INT32),
    **dict.fromkeys(("int64", "uint32"), INT64),
    "bool": BOOL,
}


class Value(NamedTuple):
    """The name of a value in the source, and the inputs that it depends on."""

    name: str
    inputs: frozenset[str] = frozenset()


class Writer:
    """An emitter (`expression.program.Emitter`) of the body's lines."""

    def __init__(self, tensors: Sequence[TensorType], language: str, wide: bool):
        self.tensors, self.language, self.wide = tensors, language, wide
        self.values: dict[str, Value] = {}  # by text: what a formula and its derivatives share is computed once

    @property
    def lines(self) -> list[str]:
        return [f"{x.name} = {text}" for text, x in self.values.items()]

    def line(self, text: str, *operands: Value) -> Value:
        inputs = frozenset[str]().union(*(x.inputs for x in operands))
        return self.values.setdefault(text, Value(f"x{len(self.values)}", inputs))

    def constant(self, value: float, kind: str) -> Value:
        number = repr(value) if repr(value).strip("-") not in ("inf", "nan") else f'float("{value}")'
        dtype = "int1" if kind == BOOL else DTYPES[kind]
        return self.number(number, dtype)

    def number(self, text: str, dtype: str) -> Value:
        """A number of a dtype. Triton's `full` makes one too, but cannot be called from Gluon (3.6 to 3.9)."""
        return self.line(f"{self.language}.cast({text}, {self.language}.{dtype})")

    def input(self, name: str) -> Value:
        return Value(name, frozenset([name]))

    def size(self, tensor: int, dimension: int) -> Value:
        return self.line(f"{self.size_text(tensor, dimension)}.to({self.language}.int32)")

    def size_text(self, tensor: int, dimension: int) -> str:
        return f"captured[{self.first(tensor) + 1 + dimension}]"

    def first(self, tensor: int) -> int:
        """The position in `captured` of a tensor's data pointer."""
        return sum(1 + 2 * x.ndim for x in self.tensors[:tensor])

    def inside(self, tensor: int, indices: Sequence[Value]) -> str | None:
        """Whether an element is in the tensor; `None` for a tensor without dimensions. A negative index is none."""
        tests = [f"inside({x.name}, {self.size_text(tensor, n)})" for n, x in enumerate(indices)]
        return " & ".join(tests) or None

    def load(self, tensor: int, indices: Sequence[Value]) -> Value:
        language, first, kind = self.language, self.first(tensor), LOADED[self.tensors[tensor].dtype]
        steps = [(len(x.inputs), self.offset(tensor, n, indices)) for n, x in enumerate(indices)]
        # What varies least is added first: sums of numbers stay numbers.
        pointer = " + ".join([f"captured[{first}]", *(text for _, text in sorted(steps, key=lambda step: step[0]))])
        mask = self.inside(tensor, indices)
        other = 'float("nan")' if kind == REAL else "0"
        inputs = frozenset[str]().union(*(x.inputs for x in indices))
        if mask is None:
            loaded = f"{language}.load({pointer})"
        elif inputs >= {"q_idx", "k_idx"}:
            loaded = f"load_pairs({pointer}, {mask}, {other}, {self.size_text(tensor, 0)})"
        else:
            loaded = self.load_masked(pointer, mask, other, tensor, indices)
        return self.line(f"{loaded} != 0" if kind == BOOL else f"{loaded}.to({language}.{DTYPES[kind]})", *indices)

    def offset(self, tensor: int, dimension: int, indices: Sequence[Value]) -> str:
        """The text of an index in elements."""
        to_wide = f".to({self.language}.int64)" if self.wide else ""
        stride = self.first(tensor) + 1 + self.tensors[tensor].ndim + dimension
        return f"{indices[dimension].name} * captured[{stride}]{to_wide}"

    def load_masked(self, pointer: str, mask: str, other: str, tensor: int, indices: Sequence[Value]) -> str:
        """The text of a load that depends on no pair."""
        return f"{self.language}.load({pointer}, mask={mask}, other={other})"

    def position(self, tensor: int, indices: Sequence[Value]) -> Value:
        """The number of an element in the tensor's order; -1 outside of the tensor."""
        language = self.language
        inside = self.inside(tensor, indices)
        if inside is None:
            return self.number("0", "int64")
        text = f"{indices[0].name}.to({language}.int64)"
        for n, x in enumerate(indices[1:], 1):
            text = f"({text} * {self.size_text(tensor, n)} + {x.name})"
        return self.line(f"{language}.where({inside}, {text}, -1)", *indices)

    def cast(self, x: Value, source: str, kind: str) -> Value:
        return self.line(f"{x.name} != 0" if kind == BOOL else f"{x.name}.to({self.language}.{DTYPES[kind]})", x)

    def round(self, x: Value, dtype: str) -> Value:
        return self.line(f"{x.name}.to({self.language}.{dtype}).to({self.language}.float32)", x)

    def floordiv(self, x: Value, y: Value, nonnegative: bool) -> Value:
        return self.line(f"floordiv({x.name}, {y.name}, {nonnegative})", x, y)

    def mod(self, x: Value, y: Value, nonnegative: bool) -> Value:
        return self.line(f"mod({x.name}, {y.name}, {nonnegative})", x, y)

    def __getattr__(self, op: str) -> Any:
        """The method of an operation of `expression.operations`."""
        if op not in OPERATIONS and op not in FUNCTIONS:
            raise AttributeError(op)

        def method(*operands: Value) -> Value:
            names = [x.name for x in operands]
            if op in FUNCTIONS:
                return self.line(f"{op}({', '.join(names)})", *operands)
            return self.line(OPERATIONS[op].format(*names, language=self.language), *operands)

        return method


class Source(NamedTuple):
    """The text of a device function, and the inputs that the position of its load depends on."""

    text: str
    position_inputs: frozenset[str]


def source(
    name: str,
    formula: Formula,
    *,
    partial: bool = False,
    load: int | None = None,
    along: tuple[int, ...] = (),
    wide: bool = False,
    language: str = "tl",
) -> Source:
    """A function that returns the new score, or of a mask whether a pair is visible. With `partial`, it also returns
    the derivative by the score; with `load`, the derivative by the element that this load of the formula reads, and the
    element's position. Loads come from `formula.partials` of all tensors of real numbers. With `along`, it also returns
    the derivative along tangents of these tensors, which follow the captured ones. `wide`: offsets into captured
    tensors have 64 bits.
    """
    tangents = tuple(formula.tensors[n] for n in along)
    writer = Writer((*formula.tensors, *tangents), language, wide)
    [score] = emit(formula.program, writer)
    results, inputs = [score], frozenset[str]()
    if partial or load is not None or along:
        wanted, found = formula.partials(differentiable(formula))
        derivatives = emit(wanted, writer)
        if partial:
            results.append(derivatives[0])
        if load is not None:
            read = found[load]
            position = writer.position(read.tensor, [derivatives[n] for n in read.indices])
            results += [derivatives[read.partial], position]
            inputs = position.inputs
        if along:
            results.append(directional(writer, [x for x in found if x.tensor in along], along, derivatives))
    body = "".join(f"    {line}\n" for line in writer.lines)
    returned = "".join(f"{x.name}, " for x in results)
    parameters = ", ".join((*INPUTS[formula.is_mask :], "captured"))
    return Source(f"def {name}({parameters}):\n{body}    return ({returned})\n", inputs)


def directional(writer: Writer, reads: Sequence[Load], along: tuple[int, ...], derivatives: Sequence[Value]) -> Value:
    """The derivative along tangents, the last of the writer's tensors, of the captured tensors `along`."""
    first, total = len(writer.tensors) - len(along), writer.constant(0.0, REAL)
    for read in reads:
        moving = writer.load(first + along.index(read.tensor), [derivatives[n] for n in read.indices])
        total = writer.add(total, writer.mul(derivatives[read.partial], moving))
    return total


def loads(formula: Formula) -> tuple[Load, ...]:
    """The loads by which the formula has derivatives."""
    return formula.partials(differentiable(formula)).loads


def differentiable(formula: Formula) -> tuple[bool, ...]:
    """Which captured tensors may have a gradient."""
    return tuple(LOADED[x.dtype] == REAL for x in formula.tensors)


def unsupported(formula: Formula) -> str | None:
    """The reason why device functions cannot read the formula's tensors, or `None`."""
    for x in formula.tensors:
        if x.dtype not in LOADED:
            return f"its {'mask' if formula.is_mask else 'score_mod'} reads a tensor of {x.dtype}"
    return None
