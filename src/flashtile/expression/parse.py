"""Formulas from their keys. A key may come from a file: every part of it is checked, so that what kernels are generated
from has names and numbers that a trace could have written, and nothing else.
"""

import json
from typing import Any

import torch

from ..errors import AttentionError
from . import ranges
from .builder import Builder
from .functions import NARROW
from .operations import ANY, OPERATIONS, SAME
from .program import BOOL, INPUTS, INT32, INT64, INTEGERS, REAL, Instruction, Program, TensorType

NUMBERS = (REAL, INT32, INT64, BOOL)
ARITY = {name: x.text.count("{}") for name, x in OPERATIONS.items()}
INTEGERS_ALONE = ("floordiv", "mod")
LOGICAL = ("and_", "or_", "xor", "not_")  # not of reals
OF_BOOLS = (*LOGICAL, "eq", "ne", "where")
MOST_DIMENSIONS = 64


def parsed(text: str) -> tuple[Program, tuple[TensorType, ...]]:
    """The program and the types of tensors that a key has, without its prefix.

    Raises:
        AttentionError: the text is no formula's.
    """
    try:
        tensors, instructions, outputs = listed(json.loads(text), 3)
        types = tuple(tensor_type(x) for x in listed(tensors))
        builder = Builder(types)
        for n, x in enumerate(listed(instructions)):
            made = instruction(builder, listed(x, 4))
            require(builder.add(made).n == n, "each instruction once")
        results = tuple(operand(builder, n) for n in listed(outputs, 1))
        kind = builder.instructions[results[0]].kind
        require(kind in (REAL, BOOL), "a real number or a condition as its result")
        names = {x.value for x in builder.instructions if x.op == "input"}
        require(kind == REAL or "score" not in names, "no score in the formula of a mask")
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        shown = text if len(text) < 200 else f"{text[:200]}..."
        raise AttentionError(
            f"a program contains a formula that cannot be read: {error}.\n  given: {shown}\n"
            "  accepted: the key of a flashtile.ScoreMod or flashtile.MaskMod, as this version of flashtile writes it"
        ) from None
    return Program(tuple(builder.instructions), results), types


def require(condition: bool, expected: str) -> None:
    if not condition:
        raise ValueError(f"expected {expected}")


def listed(x: Any, count: int | None = None) -> list[Any]:
    require(type(x) is list and count in (None, len(x)), f"a list{'' if count is None else f' of {count}'}")
    return x  # type: ignore[no-any-return]


def tensor_type(x: Any) -> TensorType:
    dtype, ndim = listed(x, 2)
    require(type(dtype) is str and isinstance(getattr(torch, dtype, None), torch.dtype), "a dtype")
    require(dtype == str(getattr(torch, dtype)).removeprefix("torch."), "the name of a dtype")
    require(dtype != "uint64" and not getattr(torch, dtype).is_complex, "a dtype of numbers that formulas have")
    require(type(ndim) is int and 0 <= ndim <= MOST_DIMENSIONS, "a number of dimensions")
    return TensorType(dtype, ndim)


def operand(builder: Builder, n: Any) -> int:
    require(type(n) is int and 0 <= n < len(builder.instructions), "the number of an earlier instruction")
    return n  # type: ignore[no-any-return]


def instruction(builder: Builder, parts: list[Any]) -> Instruction:
    op, kind, numbers, value = parts
    require(type(op) is str and type(kind) is str and kind in NUMBERS, "an operation and a kind")
    operands = tuple(operand(builder, n) for n in listed(numbers))
    kinds = [builder.instructions[n].kind for n in operands]
    if op == "size":
        value = tuple(listed(value, 2))
    x = Instruction(op, kind, operands, value)
    if op in OPERATIONS:
        require(len(operands) == ARITY[op], f"{ARITY[op]} operands of `{op}`")
        operation(builder, x, kinds)
    else:
        require(op in LEAVES, "the name of an operation")
        LEAVES[op](builder, x, kinds)
    return x


def operation(builder: Builder, x: Instruction, kinds: list[str]) -> None:
    """Operands of one kind that the operation takes, and the kind of its results, in as many bits as they need."""
    operation, own = OPERATIONS[x.op], kinds[1:] if x.op == "where" else kinds
    require(x.op != "where" or kinds[0] == BOOL, "a condition of `where`")
    require(len(set(own)) == 1, f"operands of one kind of `{x.op}`")
    kind = own[0]
    if operation.operands == ANY:
        require(kind != BOOL or x.op in OF_BOOLS, f"no conditions of `{x.op}`")
        require(kind != REAL or x.op not in (*LOGICAL, *INTEGERS_ALONE), f"no reals of `{x.op}`")
    else:
        require(kind == operation.operands, f"operands of the kind {operation.operands} of `{x.op}`")
    require(x.kind == (kind if operation.result == SAME else operation.result), f"the kind of results of `{x.op}`")
    if x.kind in INTEGERS:
        known = [builder.ranges[n] for n in (x.operands[1:] if x.op == "where" else x.operands)]
        require(x.kind == INT64 or ranges.of_result(x.op, tuple(known)).kind == INT32, "64 bits for large integers")
        if x.op in INTEGERS_ALONE:
            nonnegative = known[0].low >= 0 and known[1].low > 0
            require(type(x.value) is bool and (nonnegative or not x.value), "no division by 0")
            return
    require(x.value is None, f"no value of `{x.op}`")


def constant(builder: Builder, x: Instruction, kinds: list[str]) -> None:
    text = x.value
    require(type(text) is str and not kinds, "the text of a number")
    if x.kind == BOOL:
        require(text in ("True", "False"), "True or False")
    elif x.kind == REAL:
        require(repr(float(text)) == text, "a number as Python writes it")
    else:
        require(len(text) < 21 and repr(int(text)) == text, "an integer as Python writes it")
        require(ranges.INT64_RANGE.low <= int(text) <= ranges.INT64_RANGE.high, "an integer of 64 bits")
        require(x.kind == INT64 or ranges.Range(int(text), int(text)).kind == INT32, "64 bits for large integers")


def input_(builder: Builder, x: Instruction, kinds: list[str]) -> None:
    require(type(x.value) is str and x.value in INPUTS and not kinds, "the name of an input")
    require(x.kind == (REAL if x.value == "score" else INT32), "the kind of an input")


def tensor_of(builder: Builder, n: Any) -> TensorType:
    require(type(n) is int and 0 <= n < len(builder.tensors), "the number of a tensor")
    return builder.tensors[n]


def size(builder: Builder, x: Instruction, kinds: list[str]) -> None:
    tensor, dimension = x.value
    ndim = tensor_of(builder, tensor).ndim
    require(type(dimension) is int and 0 <= dimension < ndim, "a dimension of the tensor")
    require(x.kind == INT32 and not kinds, "a size of 32 bits")


def load(builder: Builder, x: Instruction, kinds: list[str]) -> None:
    tensor = tensor_of(builder, x.value)
    require(len(kinds) == tensor.ndim and all(k in INTEGERS for k in kinds), "an integer for each dimension")
    require(x.kind == ranges.kind_of_elements(tensor.dtype), "the kind of the tensor's elements")


def cast(builder: Builder, x: Instruction, kinds: list[str]) -> None:
    require(len(kinds) == 1 and kinds[0] != x.kind and x.value is None, "a number of another kind")
    if x.kind == INT32 and kinds[0] == INT64:
        require(builder.ranges[x.operands[0]].kind == INT32, "64 bits for large integers")


def round_(builder: Builder, x: Instruction, kinds: list[str]) -> None:
    require(x.kind == REAL and kinds == [REAL], "a real that is rounded")
    require(type(x.value) is str and x.value in NARROW.values(), "a dtype to round to")


LEAVES = {"constant": constant, "input": input_, "size": size, "load": load, "cast": cast, "round": round_}
