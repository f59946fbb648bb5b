"""Numbers that settings accept: checked where they are given, and when a traced program runs that computes them."""

import functools
import math
from typing import Any, NamedTuple

import torch

from .. import private_torch
from ..errors import ArgumentError, call_of
from .call import Settings

LARGEST_FLOAT = torch.finfo(torch.float32).max
LARGEST_INT = 2**63 - 1


class Accepted(NamedTuple):
    """Numbers from `least` to `most`, in words, and one of them."""

    least: float
    most: float
    words: str
    example: str

    def excludes(self, x: Any) -> bool:
        """Whether a number is not accepted; of a symbol of a trace, whether that is known."""
        return any(private_torch.known(outside) for outside in (x < self.least, x > self.most, x != x))


def from_least(least: int, default: str) -> Accepted:
    return Accepted(least, LARGEST_INT, f"an int from {least}, or None for {default}", "128")


ACCEPTED = {
    "scale": Accepted(
        -LARGEST_FLOAT, LARGEST_FLOAT, "a number that is finite in float32, or None for head_dim ** -0.5", "0.125"
    ),
    "softcap": Accepted(
        0, LARGEST_FLOAT, "a number above 0 that is finite in float32; None or 0 is no softcap", "50.0"
    ),
    "dropout_p": Accepted(0, math.nextafter(1, 0), "0 <= dropout_p < 1", "0.1"),
    "attention_chunk": from_least(0, "no chunks, as for 0"),
    "max_seqlen_q": from_least(0, "the total number of tokens"),
    "max_seqlen_k": from_least(0, "the total number of tokens"),
    "num_splits": from_least(1, "as many as the backend chooses"),
}


def within_bounds(window_side: Any) -> Any:
    """A side of a window: no sequence is as long as 2**31, and sums of positions stay within 64 bits."""
    if window_side is None or private_torch.known(window_side >= 2**31):
        return None
    return -(2**31) if private_torch.known(window_side < -(2**31)) else window_side


def chunk_within_bounds(chunk: Any) -> Any:
    if chunk is None or private_torch.known(chunk == 0):
        return None
    return 2**31 if private_torch.known(chunk > 2**31) else chunk


def unless_zero(softcap: Any) -> Any:
    return None if softcap is None or private_torch.known(softcap == 0) else softcap


@functools.lru_cache(maxsize=1024)
def of_program(function: str, settings: Settings) -> Settings:
    """The settings with which an operator runs. Those that a traced program has computed were symbols until then.

    Raises:
        ArgumentError: a number that the function does not accept.
    """
    for name, accepted in ACCEPTED.items():
        x = getattr(settings, name)
        if x is not None and accepted.excludes(x):
            raise ArgumentError(name, x, accepted.words, call_of(function, f"{name}={accepted.example}"))
    return settings._replace(
        softcap=unless_zero(settings.softcap),
        window_left=within_bounds(settings.window_left),
        window_right=within_bounds(settings.window_right),
        attention_chunk=chunk_within_bounds(settings.attention_chunk),
    )
