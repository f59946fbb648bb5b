"""Interpreter of the PTX in the kernels' inline assembly: arithmetic, predicates, votes and shuffles of 32 lanes.

A register holds a value of every thread, `[warps, 32, *]`. Branches go forward, to a label, and are taken by whole
warps.
"""

import functools
import itertools
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .machine import EmulationError


def run(asm: str, constraints: str, args: Sequence[Tensor], results: int, pack: int) -> list[Tensor]:
    """Results of `asm` on tensors, of which each thread holds `pack` elements at a time."""
    args = torch.broadcast_tensors(*args)
    shape = args[0].shape
    inputs = [to_registers(x, pack).unbind(-1) for x in args]
    kinds = [kind for kind in constraints.split(",") if not kind.startswith("~")]
    assert len(kinds) == pack * (results + len(args)), constraints
    operands = dict(enumerate(itertools.chain(*inputs), pack * results))
    tied = {int(kind): operands[n] for n, kind in enumerate(kinds) if kind.isdigit()}
    state = execute(asm, {f"${n}": x for n, x in (operands | tied).items()})
    outputs = [torch.stack([state[f"${n * pack + i}"] for i in range(pack)], -1) for n in range(results)]
    outputs = [x if x.is_floating_point() or x.dtype != torch.int64 else x.to(torch.int32) for x in outputs]
    return [from_registers(x, shape, pack) for x in outputs]


def to_registers(x: Tensor, pack: int) -> Tensor:
    """Elements of `[M, N // 8, 4, 2]` or `[M, 4]` by thread.

    A thread holds two columns of every eight of rows `i` and `i + 8`, or one element of each row. With pack = 1,
    elements are independent of each other.
    """
    if pack == 1:
        return x.reshape(1, 1, -1, 1)
    split = x.reshape(-1, 2, 8, *(x.shape[1:] if x.dim() == 4 else (1, 4, 1)))  # warp, half, row, eight, lane, pair
    return split.permute(0, 2, 4, 3, 1, 5).reshape(len(split), 32, 1, pack)


def from_registers(x: Tensor, shape: torch.Size, pack: int) -> Tensor:
    """The inverse of `to_registers`."""
    if pack == 1:
        return x.reshape(shape)
    return x.reshape(len(x), 8, 4, -1, 2, shape[3] if len(shape) == 4 else 1).permute(0, 4, 1, 3, 2, 5).reshape(shape)


def execute(asm: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Registers after the instructions, from those before."""
    like = next(iter(state.values()))
    active = torch.tensor(True).expand_as(like)
    some = every = True  # threads are active
    inactive: dict[str, Tensor] = {}
    lines, place = lines_of(asm), 0
    while place < len(lines):
        words = lines[place]
        place += 1
        if words[0].endswith(":"):
            active = active | inactive.pop(words[0][:-1], False)
            some, every = bool(active.any()), bool(active.all())
        elif words[1:2] == ["bra"]:
            branches = active & predicate(words[0][1:], state)
            if not (branches == branches[:, :1]).all():
                raise EmulationError("the threads of a warp diverge")
            if (start := [f"{words[2]}:"]) in lines[:place]:
                if branches.any():  # back to a label, all warps alike
                    assert branches.all()
                    place = lines.index(start)
                continue
            inactive[words[2]] = branches
            active = active & ~branches
            some, every = bool(active.any()), bool(active.all())
        elif some:
            name, *targets, operands = split_words(words)
            function = INSTRUCTIONS.get(name) or INSTRUCTIONS[name.split(".")[0]]
            results = function(name, *(operand(x, state, like) for x in operands))
            for target, result in zip(targets, results if len(targets) > 1 else (results,), strict=True):
                if not every:
                    before = state[target] if target in state else torch.zeros_like(result)
                    state[target] = torch.where(active, result, before)
                else:
                    state[target] = result
    return state


@functools.cache
def lines_of(asm: str) -> list[list[str]]:
    """Words of each instruction and label."""
    text = re.sub(r"//[^\n]*", "", asm).strip(" {}\n").replace(":", ":;")
    lines = (re.split(r"[\s,]+", line.strip()) for line in text.split(";"))
    return [words for words in lines if words[0] not in ("", ".reg", ".pragma")]


def split_words(words: list[str]) -> tuple[Any, ...]:
    """Name, results and operands of an instruction; several results are in braces."""
    name, first, *others = words
    if not first.startswith("{"):
        return name, first, others
    return name, first[1:], others[0][:-1], others[1:]


def predicate(word: str, state: dict[str, Tensor]) -> Tensor:
    return ~state[word[1:]] if word.startswith("!") else state[word]


def operand(word: str, state: dict[str, Tensor], like: Tensor) -> Tensor:
    """A register or a constant: `0f` and the bits of a float, a float, `0x` and bits, an integer."""
    found = state.get(word)
    return constant(word).expand_as(like) if found is None else found


@functools.cache
def constant(word: str) -> Tensor:
    if word.startswith("0f"):
        return torch.tensor(struct.unpack(">f", bytes.fromhex(word[2:]))[0])
    if "." in word:
        return torch.tensor(float(word))
    return torch.tensor(int(word, 0), dtype=torch.int64 if word.startswith("0x") else torch.int32)


def without_name(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An instruction that ignores its name's suffixes."""
    return lambda name, *args: function(*args)


def compare(name: str, a: Tensor, b: Tensor, other: Tensor | None = None) -> Tensor:
    result = {"gt": torch.gt, "ne": torch.ne}[name.split(".")[1]](a, b)
    return result | other if other is not None else result


def unsigned(x: Tensor) -> Tensor:
    """The bits of a register as a number."""
    return x.long() & 0xFFFFFFFF


def logic(name: str, a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Any function of three bits."""
    a, b, c = (unsigned(x) for x in (a, b, c))
    entries = [n for n in range(8) if int(table.flatten()[0]) >> n & 1]
    terms = [(a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c) for n in entries]
    return functools.reduce(torch.bitwise_or, terms) & 0xFFFFFFFF


def permute(name: str, a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """Four of the eight bytes of two registers."""
    both = torch.stack([unsigned(x) >> 8 * n & 0xFF for x in (a, b) for n in range(4)], -1)
    chosen = [unsigned(selector) >> 4 * n & 7 for n in range(4)]
    return sum(both.gather(-1, x.unsqueeze(-1)).squeeze(-1) << 8 * n for n, x in enumerate(chosen))


def vote(name: str, x: Tensor, members: Tensor) -> Tensor:
    return x.any(1, keepdim=True).expand_as(x)


def shuffle(name: str, x: Tensor, distance: Tensor, clamp: Tensor, members: Tensor) -> Tensor:
    return x[:, torch.arange(32) ^ int(distance.flatten()[0])]


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov": without_name(lambda x: x),
    "neg": without_name(torch.neg),
    "sub": without_name(torch.sub),
    "mul": without_name(torch.mul),
    "fma": without_name(lambda a, b, c: torch.addcmul(c, a, b)),
    "rcp": without_name(torch.reciprocal),
    "min": without_name(torch.fmin),
    "max": without_name(torch.fmax),
    "ex2": without_name(torch.exp2),
    "lg2": without_name(torch.log2),
    "and": without_name(torch.bitwise_and),
    "xor": without_name(lambda a, b: unsigned(a) ^ unsigned(b)),
    "add": without_name(lambda a, b: (unsigned(a) + unsigned(b)) & 0xFFFFFFFF),
    "shl": without_name(lambda a, b: unsigned(a) << b & 0xFFFFFFFF),
    "shr": without_name(lambda a, b: unsigned(a) >> b),
    "mad.lo.u32": without_name(lambda a, b, c: (unsigned(a) * unsigned(b) + unsigned(c)) & 0xFFFFFFFF),
    "mul.wide.u32": without_name(lambda a, b: unsigned(a) * unsigned(b)),  # modulo 2 ** 64
    "mov.b64": without_name(lambda x: (unsigned(x), unsigned(x >> 32))),
    "lop3": logic,
    "prmt": permute,
    "setp": compare,
    "selp": without_name(lambda a, b, condition: torch.where(condition, a, b)),
    "vote": vote,
    "shfl": shuffle,
}
