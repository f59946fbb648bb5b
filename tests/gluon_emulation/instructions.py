"""Interpreter of the PTX in the kernels' inline assembly: arithmetic, predicates, votes and shuffles of 32 lanes.

A register holds a value of every thread, `[warps, 8, 4]`: float32, uint32, uint64 or a predicate. NumPy, whose calls
cost a fraction of torch's on such arrays. Branches go forward, or back to a label, and are taken by whole warps.
"""

import functools
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .machine import EmulationError

Register = np.ndarray
LANES = np.arange(32)
NIBBLES = np.arange(0, 16, 4, dtype=np.uint32)


def run(asm: str, constraints: str, args: Sequence[Tensor], results: int, pack: int) -> list[Tensor]:
    """Results of `asm` on tensors, of which each thread holds `pack` elements at a time."""
    args = torch.broadcast_tensors(*args)
    shape = args[0].shape
    inputs = [register for x in args for register in registers(bits(x.detach().numpy()), pack)]
    count, tied = operands_of(constraints)
    assert count == pack * (results + len(args)), constraints
    state = {f"${n}": x for n, x in enumerate(inputs, pack * results)}
    state |= {f"${result}": state[f"${n}"] for result, n in tied}
    with np.errstate(all="ignore"):
        execute(asm, state)
    outputs = []
    for first in range(0, pack * results, pack):
        output = elements([state[f"${n}"] for n in range(first, first + pack)], shape)
        outputs.append(torch.from_numpy(output.view(np.int32) if output.dtype == np.uint32 else output))
    return outputs


def run_on_bytes(asm: str, x: Tensor) -> Tensor:
    """The float16 results of `asm` on bytes `[..., n]`, of which a register has four that follow each other."""
    words = np.ascontiguousarray(x.numpy()).view(np.uint32)
    state = {"$2": words.reshape(1, 1, 1, -1)}
    execute(asm, state)
    pairs = np.stack([state["$0"], state["$1"]], -1).reshape(*words.shape[:-1], -1)
    return torch.from_numpy(pairs.view(np.float16))


@functools.cache
def operands_of(constraints: str) -> tuple[int, list[tuple[int, int]]]:
    """The number of all operands, and results with the operands that they begin as."""
    kinds = [kind for kind in constraints.split(",") if not kind.startswith("~")]
    return len(kinds), [(int(kind), n) for n, kind in enumerate(kinds) if kind.isdigit()]


def registers(x: Register, pack: int) -> Sequence[Register]:
    """The registers that hold `[M, N // 8, 4, 2]` or `[M, 4]`, each contiguous.

    A thread holds two columns of every eight of rows `i` and `i + 8`, or one element of each row. With pack = 1,
    elements are independent of each other.
    """
    if pack == 1:
        return [x.reshape(1, 1, 1, -1)]
    rows = x.reshape(-1, 2, 8, *(x.shape[1:] if x.ndim == 4 else (1, 4, 1)))  # warp, half, row, eight, lane, pair
    by_register = np.ascontiguousarray(rows.transpose(3, 1, 5, 0, 2, 4))
    return by_register.reshape(pack, *by_register.shape[3:])


def elements(values: Sequence[Register], shape: torch.Size) -> Register:
    """The inverse of `registers`."""
    if len(values) == 1:
        return np.array(values[0]).reshape(shape)
    eights, lanes, pairs = shape[1:] if len(shape) == 4 else (1, 4, 1)
    by_register = np.stack(values).reshape(eights, 2, pairs, -1, 8, lanes)
    return np.ascontiguousarray(by_register.transpose(3, 1, 4, 0, 5, 2)).reshape(shape)


def bits(x: Register) -> Register:
    """Integers as registers hold them."""
    return x if x.dtype == np.float32 else x.astype(np.uint32)


class Line(NamedTuple):
    """An instruction, a branch if `branch` is its label, or the label `label`."""

    function: Callable[..., Any] | None = None
    targets: tuple[str, ...] = ()
    operands: tuple[str, ...] = ()
    label: str = ""
    branch: str = ""


def execute(asm: str, state: dict[str, Register]) -> None:
    """Execute the instructions on registers."""
    shape = next(iter(state.values())).shape
    active = np.full(shape, True)
    some = every = True  # threads are active
    inactive: dict[str, Register] = {}
    lines, place = lines_of(asm), 0
    while place < len(lines):
        line = lines[place]
        place += 1
        if line.label:
            active = active | inactive.pop(line.label, False)
            some, every = bool(active.any()), bool(active.all())
        elif line.branch:
            branches = active & predicate(line.operands[0], state)
            if not (branches == branches[:, :1, :1]).all():
                raise EmulationError("the threads of a warp diverge")
            if (start := Line(label=line.branch)) in lines[:place]:
                if branches.any():  # back to a label, all warps alike
                    assert branches.all()
                    place = lines.index(start)
                continue
            inactive[line.branch] = branches
            active = active & ~branches
            some, every = bool(active.any()), bool(active.all())
        elif some:
            assert line.function is not None
            results = line.function(*(state[x] if x in state else constant(x, shape) for x in line.operands))
            for target, result in zip(line.targets, results if len(line.targets) > 1 else (results,), strict=True):
                if not every:
                    result = np.where(active, result, state[target] if target in state else np.zeros_like(result))
                state[target] = result


@functools.cache
def lines_of(asm: str) -> list[Line]:
    text = re.sub(r"//[^\n]*", "", asm).strip(" {}\n").replace(":", ":;")
    lines = (re.split(r"[\s,]+", line.strip()) for line in text.split(";"))
    return [line_of(words) for words in lines if words[0] not in ("", ".reg", ".pragma")]


def line_of(words: list[str]) -> Line:
    """Several results of an instruction are in braces."""
    name, *others = words
    if name.endswith(":"):
        return Line(label=name[:-1])
    if others[0] == "bra":
        return Line(branch=others[1], operands=(name[1:],))
    count = 2 if others[0].startswith("{") else 1
    targets = tuple(x.strip("{}") for x in others[:count])
    return Line(function_of(name), targets, tuple(others[count:]))


def function_of(name: str) -> Callable[..., Any]:
    kind, *suffixes = name.split(".")
    if kind == "setp":
        return functools.partial(compare, {"gt": np.greater, "lt": np.less, "ne": np.not_equal}[suffixes[0]])
    return INSTRUCTIONS[name] if name in INSTRUCTIONS else INSTRUCTIONS[kind]


def predicate(word: str, state: dict[str, Register]) -> Register:
    return ~state[word[1:]] if word.startswith("!") else state[word]


@functools.cache
def constant(word: str, shape: tuple[int, ...]) -> Register:
    """`0f` and the bits of a float, a float, `0x` and bits, an integer."""
    if word.startswith("0f"):
        return np.full(shape, struct.unpack(">f", bytes.fromhex(word[2:]))[0], np.float32)
    if "." in word:
        return np.full(shape, float(word), np.float32)
    return np.full(shape, int(word, 0) & 0xFFFFFFFF, np.uint32)


def compare(function: Callable[..., Register], a: Register, b: Register, other: Register | None = None) -> Register:
    result = function(a, b)
    return result | other if other is not None else result


def logic(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Any function of three bits."""
    number = int(table.flat[0])
    if number == 0x96:  # two thirds of dropout's instructions
        return a ^ b ^ c
    entries = [n for n in range(8) if number >> n & 1]
    terms = [(a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in entries]
    return functools.reduce(np.bitwise_or, terms)


def permute(a: Register, b: Register, selector: Register) -> Register:
    """Four of the eight bytes of two registers."""
    both = np.stack([a, b], -1).view(np.uint8)
    return np.take_along_axis(both, (selector[..., None] >> NIBBLES) & 7, -1).view(np.uint32)[..., 0]


def vote(x: Register, members: Register) -> Register:
    return np.broadcast_to(x.any((1, 2), keepdims=True), x.shape)


def shuffle(x: Register, distance: Register, clamp: Register, members: Register) -> Register:
    return x.reshape(-1, 32)[:, LANES ^ int(distance.flat[0])].reshape(x.shape)


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov": lambda x: x,
    "neg": np.negative,
    "sub": np.subtract,
    "sub.f16x2": lambda a, b: (a.view(np.float16) - np.ascontiguousarray(b).view(np.float16)).view(np.uint32),
    "mul": np.multiply,
    "fma": lambda a, b, c: a * b + c,
    "rcp": np.reciprocal,
    "min": np.fmin,
    "max": np.fmax,
    "ex2": np.exp2,
    "lg2": np.log2,
    "and": np.bitwise_and,
    "xor": np.bitwise_xor,
    "add": np.add,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "mul.wide.u32": lambda a, b: a.astype(np.uint64) * b,
    "mov.b64": lambda x: (x.astype(np.uint32), (x >> np.uint64(32)).astype(np.uint32)),
    "lop3": logic,
    "prmt": permute,
    "selp": lambda a, b, condition: np.where(condition, a, b),
    "vote": vote,
    "shfl": shuffle,
}
