"""Masks and score modifications of models, by the names that a cell of a sweep has for them."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..expression import ScoreMod
from ..score_mods import relative_table, t5_buckets

# Each gets the indices b [B, 1, 1, 1], i [Sq, 1], j [Sk] and the pattern's number, and returns a mask of bools.
MASKS: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "prefix": lambda b, i, j, n: (j <= i) | (j < n),  # n keys for everyone, then causal
    "frames": lambda b, i, j, n: j // n <= i // n,  # causal in frames of n tokens
    "blocks": lambda b, i, j, n: j // n == i // n,  # blocks of n tokens, each for itself
    "shifted": lambda b, i, j, n: region(b, i, n) == region(b, j, n),
}


def region(b: Tensor, i: Tensor, side: int) -> Tensor:
    """Region of token `i` in a shifted window of `side` x `side` tokens; one window in four is cut in two (Liu et al.,
    "Swin Transformer", 2021, section 3.2).
    """
    return ((b % 4 == 0) & (i // side >= side // 2)).int()


def relative(heads: int, device: torch.device) -> ScoreMod:
    """A bias for each distance up to 512."""
    return relative_table(normal(heads, 1025).to(device))


def t5(heads: int, device: torch.device) -> ScoreMod:
    return t5_buckets(normal(32, heads).to(device))


def normal(*shape: int) -> Tensor:
    """Values that bfloat16 has too: for libraries that take the terms as a tensor in the dtype of q."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16().float()


# All add to the score, so that libraries without score functions can take the sum as a tensor.
SCORE_MODS: dict[str, Callable[[int, torch.device], ScoreMod]] = {"relative": relative, "t5": t5}


def check_patterns(mask: bool | str, score_mod: str) -> None:
    """Raise a ValueError for a name that does not exist."""
    if isinstance(mask, str):
        name, _, number = mask.partition(" ")
        if name not in MASKS or not number.isdigit() or int(number) < 1:
            raise ValueError(f"mask is {mask!r}, should be true, false or one of {', '.join(MASKS)} with a number")
    if score_mod and score_mod not in SCORE_MODS:
        raise ValueError(f"score_mod is {score_mod!r}, should be one of {', '.join(SCORE_MODS)}")


def pattern(mask: str, batch: int, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """The mask of a pattern, bool [1 or B, 1, Sq, Sk]."""
    name, _, number = mask.partition(" ")
    b = torch.arange(batch, device=device)[:, None, None, None]
    i, j = torch.arange(seqlen_q, device=device)[:, None], torch.arange(seqlen_k, device=device)
    shown = MASKS[name](b, i, j, int(number))
    return shown.reshape(-1, 1, seqlen_q, seqlen_k)
