"""Mask functions of transformers as patterns: a window, chunks, packed sequences, padding.

A mask function is a closure `(batch, head, q, kv) -> bool` over absolute positions. Those of transformers have a known
name and keep their numbers and tensors in cells. A function of another origin has no pattern.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers import masking_utils as originals  # pyright: ignore - optional


class Pattern(NamedTuple):
    """The pairs that a mask function shows, as an intersection.

    Attributes:
        left, right: key j is visible to query i iff `i - left <= j <= i + right`; `None` is unlimited.
        chunk: positions `(j - begin[b]) // size` must equal the query's: `(size, begin [B])`.
        packed: `[B, S]`, numbers of sequences, which must be equal.
        padding: bool `[B, S]`; False hides a key.
    """

    left: int | None = None
    right: int | None = None
    chunk: tuple[int, Tensor] | None = None
    packed: Tensor | None = None
    padding: Tensor | None = None


def smaller(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)


def both(a: Pattern | None, b: Pattern | None) -> Pattern | None:
    """The intersection; `None` where a pattern is unknown, or would need two chunkings or the like."""
    if a is None or b is None:
        return None
    once = [(getattr(a, name), getattr(b, name)) for name in ("chunk", "packed", "padding")]
    if any(x is not None and y is not None for x, y in once):
        return None
    merged = [y if x is None else x for x, y in once]
    return Pattern(smaller(a.left, b.left), smaller(a.right, b.right), *merged)


def window(sliding_window: int) -> Pattern:
    return Pattern(left=sliding_window - 1)


def window_of_both_sides(sliding_window: int) -> Pattern:
    return Pattern(left=sliding_window, right=sliding_window)


def chunks(chunk_size: int, left_padding: Tensor) -> Pattern:
    return Pattern(chunk=(chunk_size, left_padding))


def packed(packed_sequence_mask: Tensor) -> Pattern:
    return Pattern(packed=packed_sequence_mask)


def padding(padding_mask: Tensor) -> Pattern:
    return Pattern(padding=padding_mask)


def intersection(mask_functions: tuple[Callable, ...]) -> Pattern | None:
    pattern: Pattern | None = Pattern()
    for function in mask_functions:
        pattern = both(pattern, pattern_of(function))
    return pattern


PLAIN = {
    originals.causal_mask_function: Pattern(right=0),
    originals.bidirectional_mask_function: Pattern(),
}

# By the function that makes the closure; arguments of ours have the names of its cells.
MAKERS: dict[str, Callable[..., Pattern | None]] = {
    "sliding_window_overlay": window,
    "sliding_window_bidirectional_overlay": window_of_both_sides,
    "chunked_overlay": chunks,
    "packed_sequence_mask_function": packed,
    "padding_mask_function": padding,
    "and_masks": intersection,
}


def pattern_of(function: Callable[..., Any]) -> Pattern | None:
    """The pattern of a mask function, or `None` if it is unknown."""
    if function in PLAIN:
        return PLAIN[function]
    code = getattr(function, "__code__", None)
    if code is None or getattr(function, "__module__", None) != originals.__name__:
        return None
    maker, _, local = function.__qualname__.partition(".")
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    values = dict(zip(code.co_freevars, cells, strict=True))
    convert = MAKERS.get(maker)
    if convert is None or not local.startswith("<locals>.") or values.keys() != arguments_of(convert):
        return None
    return convert(**values)


def arguments_of(function: Callable[..., Any]) -> set[str]:
    code = function.__code__
    return set(code.co_varnames[: code.co_argcount])
