"""Ready mask functions: each returns a `MaskMod` for the argument `mask`, and each is a pattern for others.

Positions count from the start of each sequence, for queries and for keys. Where queries continue a longer sequence of
keys, `offset`, a number or an integer tensor without dimensions, is added to theirs: `Sk - Sq` aligns the last ones, as
`causal=True` does. Tensors of integers, as lengths and ids, may be of any integer dtype.
"""

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from .errors import ArgumentError
from .expression import MaskMod, mask_mod_function

__all__ = [
    "and_masks",
    "block_diffusion",
    "causal",
    "dilated",
    "document",
    "flashmask",
    "neighborhood",
    "or_masks",
    "prefix",
    "tree",
    "window",
]
MaskFunction = MaskMod | Callable[..., Tensor]


def causal(offset: int | Tensor = 0) -> MaskMod:
    """Keys up to the query's position."""
    return MaskMod(lambda b, h, q_idx, k_idx: k_idx <= q_idx + offset)


def window(left: int, right: int, offset: int | Tensor = 0) -> MaskMod:
    """Keys from `left` positions before the query to `right` behind it (Beltagy et al., "Longformer", 2020, section
    3.1).
    """

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        distance = q_idx + offset - k_idx
        return (distance <= left) & (distance >= -right)

    return MaskMod(fn)


def prefix(lengths: Tensor) -> MaskMod:
    """All keys of a prefix, of `lengths [B]`, and keys up to the query's position (Raffel et al., "T5", 2020, section
    3.2.1).
    """
    return MaskMod(lambda b, h, q_idx, k_idx, lengths: (k_idx < lengths[b]) | (k_idx <= q_idx), (lengths,))


def document(ids: Tensor, key_ids: Tensor | None = None) -> MaskMod:
    """Keys of the query's document, by integer ids `[S]` or `[B, S]`; keys have `ids` too by default (Krell et
    al., "Efficient sequence packing without cross-contamination", 2021, section 3).
    """

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, *ids: Tensor) -> Tensor:
        of_query, of_key = (x[n] if x.dim() == 1 else x[b, n] for x, n in ((ids[0], q_idx), (ids[-1], k_idx)))
        return of_query == of_key

    return MaskMod(fn, (ids,) if key_ids is None else (ids, key_ids))


def dilated(width: int, dilation: int, offset: int | Tensor = 0) -> MaskMod:
    """Each `dilation`-th key up to `width` positions from the query (Beltagy et al.,
    "Longformer", 2020, section 3.1).
    """

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        distance = (q_idx + offset - k_idx).abs()
        return (distance <= width) & (distance % dilation == 0)

    return MaskMod(fn)


def neighborhood(shape: tuple[int, ...], kernel: tuple[int, ...]) -> MaskMod:
    """The nearest keys in a grid of tokens of this shape, in row-major order: `kernel` of them in each dimension, odd
    numbers, also for queries at a border (Hassani et al., "Neighborhood Attention Transformer", 2023, section 3.1).
    """

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        visible, step = [], 1
        for size, width in reversed(list(zip(shape, kernel, strict=True))):
            radius = width // 2
            center = (q_idx // step % size).clamp(radius, size - 1 - radius)
            visible.append((k_idx // step % size - center).abs() <= radius)
            step *= size
        return reduce(operator.and_, visible)

    return MaskMod(fn)


def block_diffusion(length: int, block: int) -> MaskMod:
    """Attention of `length` noisy tokens followed by the same tokens without noise, in blocks: noisy ones see their own
    noisy block and the clean blocks before it; clean ones see clean blocks up to their own (Arriola et al., "Block
    Diffusion", 2025, section 3.2).
    """

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        clean_query, clean_key = q_idx >= length, k_idx >= length
        of_query, of_key = q_idx % length // block, k_idx % length // block
        own = (of_query == of_key) & (clean_query == clean_key)
        return own | ((of_key < of_query) & clean_key)

    return MaskMod(fn)


def flashmask(startend_row_indices: Tensor, causal: bool = False, group: int = 1) -> MaskMod:
    """Keys outside of one or two runs of rows that each key's column hides: integers `[B, H, Sk, 1 | 2 | 4]`, the first
    two may be 1. Key j is hidden from the rows LTS_j to LTE_j - 1 and UTS_j to UTE_j - 1; with `causal`, also from rows
    before j. The last dimension has, with `causal`, LTS alone, whose run ends with the last row, or LTS and LTE;
    without, LTS and UTE, whose run begins with the first row, or all four. Each of the H heads stands for `group` query
    heads (Wang et al., "FlashMask", 2024, section 4.1).
    """
    columns = startend_row_indices
    if columns.dim() != 4 or columns.is_floating_point() or columns.shape[-1] not in ((1, 2) if causal else (2, 4)):
        accepted = f"integers [B, H, Sk, {'1 or 2' if causal else '2 or 4'}] with causal={causal}"
        example = "flashtile.mask_mods.flashmask(starts[None, None, :, None], causal=True)"
        raise ArgumentError("startend_row_indices", columns, accepted, example)
    batch, heads, _, bounds = columns.shape

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, columns: Tensor) -> Tensor:
        place = (b if batch > 1 else 0, h // group if heads > 1 else 0, k_idx)
        bound = [columns[(*place, n)] for n in range(bounds)]
        below = q_idx < bound[0]  # the first run
        if bounds == (2 if causal else 4):
            below = below | (q_idx >= bound[1])
        if causal:
            return below & (k_idx <= q_idx)
        above = q_idx >= bound[-1]  # the second run
        return below & (above if bounds == 2 else above | (q_idx < bound[2]))

    return MaskMod(fn, (columns,))


def tree(parents: Tensor, context: int | Tensor = 0) -> MaskMod:
    """Keys of a query's ancestors in a tree of tokens, and of itself: `parents [S]` are numbers of earlier tokens, or
    -1 of a root. All queries see the first `context` keys, a number or an integer tensor without dimensions; the tree's
    follow. The values of `parents` are read (Miao et al., "SpecInfer", 2024, section 4.2).
    """
    above = parents.tolist()
    sizes = [1] * len(above)  # sizes of subtrees
    for n in reversed(range(len(above))):
        if above[n] >= 0:
            sizes[above[n]] += sizes[n]
    places, free = [0] * len(above), [0] * (len(above) + 1)  # depth first, so that a subtree is a range of places
    for n, parent in enumerate(above):
        places[n] = free[parent]
        free[parent] += sizes[n]
        free[n] = places[n] + 1
    begin = torch.tensor(places, dtype=torch.int32, device=parents.device)
    end = begin + torch.tensor(sizes, dtype=torch.int32, device=parents.device)

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        node = (k_idx - context).clamp(min=0)
        return (k_idx < context) | ((begin[node] <= begin[q_idx]) & (begin[q_idx] < end[node]))

    return MaskMod(fn, (begin, end))


def and_masks(*masks: MaskFunction) -> MaskMod:
    """Pairs that all of these masks show."""
    return combined(operator.and_, masks)


def or_masks(*masks: MaskFunction) -> MaskMod:
    """Pairs that any of these masks shows."""
    return combined(operator.or_, masks)


def combined(operation: Callable[[Any, Any], Any], masks: tuple[MaskFunction, ...]) -> MaskMod:
    """Masks whose results are combined."""
    mods = [mask if isinstance(mask, MaskMod) else MaskMod(mask) for mask in masks]
    functions = [mask_mod_function(mod.current_key) for mod in mods]

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, *tensors: Tensor) -> Tensor:
        rest = iter(tensors)
        own = [[next(rest) for _ in mod.tensors] for mod in mods]
        return reduce(operation, (f(b, h, q_idx, k_idx, *x) for f, x in zip(functions, own, strict=True)))

    return MaskMod(fn, [x for mod in mods for x in mod.tensors])
