"""The instructions of the Hopper backend's `branches` and `exponentials`, by the word after `//` in their first line.

A warp has 16 rows of a tile, one after the other. A thread has two columns of row `i`, then the same of row `i + 8`.
"""

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max
SLACK = 8.0


def run(asm: str, args: Sequence[Tensor]) -> Tensor | tuple[Tensor, ...] | None:
    """Results; or `None` for other instructions."""
    word = re.match(r"\{ // (\w+)", asm)
    return None if word is None else INSTRUCTIONS[word[1]](asm, *args)


def of_warp(rows: Tensor) -> Tensor:
    """Whether it is so for any of the 16 rows, for each of them."""
    return rows.reshape(-1, 16).any(1, keepdim=True).expand(-1, 16).reshape(-1, 1)


def follow(asm: str, level: Tensor, top: Tensor, factor: Tensor) -> tuple[Tensor, ...]:
    row = top[:, 0]
    for other in top.unbind(1):
        row = torch.fmax(row, other)
    row = row[:, None]
    above = row * factor - SLACK > level
    moved = of_warp(above.any(1)).expand_as(level)
    new = torch.where(moved & above, (row * factor).clamp(max=LARGEST), level)
    return new, torch.where(moved, torch.exp2(level - new), 1.0), moved.int()


def is_guessed(t: Tensor, guessed: int) -> Tensor:
    eights, pair = torch.arange(t.shape[1])[:, None, None], torch.arange(2)
    second = (torch.arange(t.shape[0]) % 16 >= 8).int()[:, None, None, None]
    return (eights * 4 + second * 2 + pair < guessed).expand_as(t)


def exponential(t: Tensor, level: Tensor, factor: Tensor) -> Tensor:
    return torch.exp2((t.double() * factor - level).float())


def guesses(asm: str, t: Tensor, level: Tensor, factor: Tensor) -> Tensor:
    return torch.where(is_guessed(t, asm.count("ex2")), exponential(t, level, factor), 0.0)


def exponentials(asm: str, guess: Tensor, t: Tensor, level: Tensor, moved: Tensor, factor: Tensor) -> Tensor:
    kept = is_guessed(t, asm.partition("KEPT:\n")[0].count("ex2")) if "KEPT:" in asm else torch.tensor(False)
    return torch.where(kept & (moved == 0), guess, exponential(t, level, factor))


def product(asm: str, x: Tensor, factor: Tensor, moved: Tensor) -> Tensor:
    return torch.where(moved != 0, x * factor, x)


def powers(asm: str, x: Tensor) -> Tensor:
    return torch.exp2(x)


INSTRUCTIONS: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    f.__name__: f for f in (follow, guesses, exponentials, product, powers)
}
