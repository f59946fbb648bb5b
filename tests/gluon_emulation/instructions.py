"""PTX instructions as kernels write them: arithmetic, predicates, and what the 32 lanes of a warp tell each other.

A register is a number of every thread, `[warps, 32, *]`. Branches lead on to a label and are taken by whole warps.
"""

import functools
import itertools
import re
import struct
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .machine import EmulationError


def run(asm: str, constraints: str, args: Sequence[Tensor], results: int, pack: int) -> list[Tensor]:
    """What `asm` makes of tensors, of which each thread has `pack` numbers at a time."""
    shape = torch.broadcast_shapes(*(x.shape for x in args))
    inputs = [registers(x.expand(shape), pack).unbind(-1) for x in args]
    kinds = [kind for kind in constraints.split(",") if not kind.startswith("~")]
    assert len(kinds) == pack * (results + len(args)), constraints
    given = dict(enumerate(itertools.chain(*inputs), pack * results))
    bound = {int(kind): given[n] for n, kind in enumerate(kinds) if kind.isdigit()}
    found = execute(asm, {f"${n}": x for n, x in (given | bound).items()})
    return [
        tensor(torch.stack([found[f"${n * pack + i}"] for i in range(pack)], -1), shape, pack) for n in range(results)
    ]


def registers(x: Tensor, pack: int) -> Tensor:
    """Of `[M, N // 8, 4, 2]` or `[M, 4]`: a thread has two columns of every eight of row `i`, the same of row `i + 8`,
    or one number of each. Numbers that are taken one by one have no place.
    """
    if pack == 1:
        return x.reshape(1, 1, -1, 1)
    apart = x.reshape(-1, 2, 8, *(x.shape[1:] if x.dim() == 4 else (1, 4, 1)))  # warp, half, row, eight, lane, pair
    return apart.permute(0, 2, 4, 3, 1, 5).reshape(len(apart), 32, 1, pack)


def tensor(x: Tensor, shape: torch.Size, pack: int) -> Tensor:
    """The inverse."""
    if pack == 1:
        return x.reshape(shape)
    return x.reshape(len(x), 8, 4, -1, 2, shape[3] if len(shape) == 4 else 1).permute(0, 4, 1, 3, 2, 5).reshape(shape)


def execute(asm: str, at: dict[str, Tensor]) -> dict[str, Tensor]:
    """The registers after the instructions, of those before."""
    some = next(iter(at.values()))
    awake = torch.ones_like(some, dtype=torch.bool)
    asleep: dict[str, Tensor] = {}
    for words in lines_of(asm):
        if words[0].endswith(":"):
            awake = awake | asleep.pop(words[0][:-1])
        elif words[1:2] == ["bra"]:
            leaves = awake & predicate(words[0][1:], at)
            if not (leaves == leaves[:, :1]).all():
                raise EmulationError("a warp's threads branch apart")
            asleep[words[2]] = leaves
            awake = awake & ~leaves
        else:
            name, target, *operands = words
            result = INSTRUCTIONS[name.split(".")[0]](name, *(operand(x, at, some) for x in operands))
            if asleep:  # what was never written is anything
                result = torch.where(awake, result, at.get(target, torch.zeros_like(result)))
            at[target] = result
    return at


@functools.cache
def lines_of(asm: str) -> list[list[str]]:
    """The words of each instruction and label."""
    plain = re.sub(r"//[^\n]*", "", asm).strip(" {}\n").replace(":", ":;")
    lines = (re.split(r"[\s,]+", line.strip()) for line in plain.split(";"))
    return [words for words in lines if words[0] not in ("", ".reg")]


def predicate(word: str, at: dict[str, Tensor]) -> Tensor:
    return ~at[word[1:]] if word.startswith("!") else at[word]


def operand(word: str, at: dict[str, Tensor], like: Tensor) -> Tensor:
    """A register, or a constant: `0f` and the bits of a float, a float, `0x` and bits, a whole number."""
    if word in at:
        return at[word]
    if word.startswith("0f"):
        return torch.full(like.shape, struct.unpack(">f", bytes.fromhex(word[2:]))[0])
    if "." in word:
        return torch.full(like.shape, float(word))
    return torch.full(like.shape, int(word, 0), dtype=torch.int64 if word.startswith("0x") else torch.int32)


def plainly(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda name, *args: function(*args)


def compare(name: str, a: Tensor, b: Tensor, other: Tensor | None = None) -> Tensor:
    found = {"gt": torch.gt, "ne": torch.ne}[name.split(".")[1]](a, b)
    return found | other if other is not None else found


def vote(name: str, voice: Tensor, members: Tensor) -> Tensor:
    return voice.any(1, keepdim=True).expand_as(voice)


def shuffle(name: str, x: Tensor, distance: Tensor, clamp: Tensor, members: Tensor) -> Tensor:
    return x[:, torch.arange(32) ^ int(distance.flatten()[0])]


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov": plainly(lambda x: x),
    "neg": plainly(torch.neg),
    "sub": plainly(torch.sub),
    "mul": plainly(torch.mul),
    "fma": plainly(lambda a, b, c: torch.addcmul(c, a, b)),
    "rcp": plainly(torch.reciprocal),
    "min": plainly(torch.fmin),
    "max": plainly(torch.fmax),
    "ex2": plainly(torch.exp2),
    "lg2": plainly(torch.log2),
    "and": plainly(torch.bitwise_and),
    "setp": compare,
    "selp": plainly(lambda a, b, chosen: torch.where(chosen, a, b)),
    "vote": vote,
    "shfl": shuffle,
}
