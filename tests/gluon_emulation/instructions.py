"""PTX instructions as kernels write them: arithmetic, predicates, and what the 32 lanes of a warp tell each other.

Registers are 32 bits of every thread, `[warps, 32, *]`, and hold numbers of either kind. Branches lead on to a label
and are taken by whole warps.
"""

import functools
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .machine import EmulationError


def run(asm: str, constraints: str, args: Sequence[Tensor], dtypes: Sequence[torch.dtype], pack: int) -> list[Tensor]:
    """What `asm` makes of tensors, of which each thread has `pack` numbers at a time."""
    shape = torch.broadcast_shapes(*(x.shape for x in args))
    inputs = [registers(bits_of(x).expand(shape), pack) for x in args]
    kinds = [kind for kind in constraints.split(",") if not kind.startswith("~")]
    assert len(kinds) == pack * (len(dtypes) + len(args)), constraints
    given = dict(enumerate((inputs[n // pack][..., n % pack] for n in range(pack * len(args))), pack * len(dtypes)))
    bound = {str(int(kind)): given[n] for n, kind in enumerate(kinds) if kind.isdigit()}
    found = execute(asm, {f"${n}": x for n, x in given.items()} | {f"${n}": x for n, x in bound.items()})
    results = [torch.stack([found[f"${n * pack + i}"] for i in range(pack)], -1) for n in range(len(dtypes))]
    return [as_type(tensor(x, shape, pack), dtype) for x, dtype in zip(results, dtypes, strict=True)]


def bits_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32) if x.dtype.is_floating_point else x.to(torch.int32)


def as_type(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.contiguous().view(dtype) if dtype.is_floating_point else bits.to(dtype)


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
            # What was never written is anything.
            at[target] = torch.where(awake, result, at.get(target, ~result)) if asleep else result
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
    if "." in word:
        return bits_of(torch.full(like.shape, float(word)))
    number = int(word[2:], 16) if word[:2] in ("0f", "0x") else int(word)
    return torch.full_like(like, number - (1 << 32) if number >= 1 << 31 else number)


def floats(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda name, *args: bits_of(function(*(x.view(torch.float32) for x in args)))


def multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b + c).float()


def compare(name: str, a: Tensor, b: Tensor, other: Tensor | None = None) -> Tensor:
    _, how, *_ = name.split(".")
    if "f32" in name:
        a, b = a.view(torch.float32), b.view(torch.float32)
    found = {"gt": torch.gt, "ne": torch.ne}[how](a, b)
    return found | other if other is not None else found


def vote(name: str, voice: Tensor, members: Tensor) -> Tensor:
    return voice.any(1, keepdim=True).expand_as(voice)


def shuffle(name: str, x: Tensor, distance: Tensor, clamp: Tensor, members: Tensor) -> Tensor:
    return x[:, torch.arange(32) ^ int(distance.flatten()[0])]


INSTRUCTIONS: dict[str, Callable[..., Tensor]] = {
    "mov": lambda name, x: x,
    "neg": floats(torch.neg),
    "sub": floats(torch.sub),
    "mul": floats(torch.mul),
    "fma": floats(multiply_add),
    "rcp": floats(torch.reciprocal),
    "min": floats(torch.fmin),
    "max": floats(torch.fmax),
    "ex2": floats(torch.exp2),
    "and": lambda name, a, b: a & b,
    "setp": compare,
    "selp": lambda name, a, b, chosen: torch.where(chosen, a, b),
    "vote": vote,
    "shfl": shuffle,
}
