"""The visible pairs of a mask, in blocks: from the summary of blocks that kernels use."""

from typing import Any

import torch
from torch import Tensor

from ..block_mask import BlockMask, is_flex
from ..call.window import Window
from ..errors import ArgumentError
from ..expression import Formula, MaskMod, Untraced, mask_mod_formula
from ..expression.blocks import HIDDEN, Blocks, block_visibility, mask_visibility, positions
from .visible import BLOCK, Document
from .work import MaskBlocks, bounds, lengths_of

MOST = 1024  # blocks of rows, and of keys
EXAMPLE = "flashtile.distributed.balanced(mesh, length, mask=flashtile.mask_mods.prefix(lengths))"


def mask_blocks(
    mask: Any, window: Window, documents: tuple[Document, ...], packed: bool, batch: int, heads: int
) -> tuple[MaskBlocks, ...]:
    """The visible pairs of each sequence, as a mean over `batch` sequences of a dense call and over `heads`.

    Blocks come from lists, else have `BLOCK` positions, or more where there would be too many. A partly visible one
    counts as visible, since kernels compute it as a whole. Waits for the device of the mask.
    """
    length = max((piece.stop for document in documents for piece in document), default=0)
    size = BLOCK * 2 ** max(-(-length // (BLOCK * MOST)) - 1, 0).bit_length()
    sizes = size, size
    if is_flex(mask):
        mask = BlockMask.of_flex(mask)
    if isinstance(mask, BlockMask):
        sizes = mask.block_size
        if packed:
            mask.reject_packed(EXAMPLE)
        else:
            mask.reject_lengths(EXAMPLE, documents[0].rows.length, documents[0].keys.length)
    elif isinstance(mask, Tensor):
        check_tensor(mask, documents, packed)
    else:
        mask = MaskMod.of(mask)
    found = []
    for n, document in enumerate(documents):
        pairs = window_pairs(window, document, sizes)
        if pairs.numel() > 0:
            sequences = [n] if packed else [*range(batch)]
            pairs *= visible_share(states_of(mask, document, sequences, heads, sizes))
        found.append(MaskBlocks(document, sizes, pairs))
    return tuple(found)


def states_of(
    mask: MaskMod | Tensor, document: Document, sequences: list[int], heads: int, sizes: tuple[int, int]
) -> Tensor:
    """States of a sequence's blocks, `[B, H, blocks of rows, blocks of keys]`, on the device of the mask."""
    rows, keys = document.rows.length, document.keys.length
    if isinstance(mask, Tensor):
        return mask_visibility(mask, rows, keys, *sizes)
    if isinstance(mask, BlockMask):
        states = mask.tensors[0]
        if states.shape[0] > 1:
            states = states[sequences[0] : sequences[-1] + 1]
        missing = [-(-n // size) - count for n, size, count in zip((rows, keys), sizes, states.shape[2:], strict=True)]
        return torch.nn.functional.pad(states, (0, missing[1], 0, missing[0]))  # what no list has is hidden
    return function_states(mask, sequences, heads, (rows, keys), sizes)


def check_tensor(mask: Tensor, documents: tuple[Document, ...], packed: bool) -> None:
    sizes = [piece.length for piece in documents[0]] if documents else []
    fits = mask.dim() == 4 and all(n in (1, m) for n, m in zip(mask.shape[2:], sizes, strict=True))
    if packed or mask.dtype != torch.bool or not fits:
        accepted = f"bool [B, Hq, {', '.join(map(str, sizes))}]; for packed sequences a function"
        raise ArgumentError("mask", mask, accepted, EXAMPLE)


def function_states(
    mod: MaskMod, sequences: list[int], heads: int, lengths: tuple[int, int], sizes: tuple[int, int]
) -> Tensor:
    """States of the blocks by a mask function, on its device."""
    formula = mask_mod_formula(mod.current_key)
    if isinstance(formula, Untraced):
        accepted = f"a mask function that can be traced; this one cannot: {formula.reason}"
        raise ArgumentError("mask", mod.fn, accepted, EXAMPLE)
    assert isinstance(formula, Formula)
    device = mod.tensors[0].device if mod.tensors else torch.device("cpu")
    blocks = Blocks(
        torch.tensor(sequences, device=device),
        torch.arange(heads, device=device),
        *(positions(0, length, size, device) for length, size in zip(lengths, sizes, strict=True)),
    )
    return block_visibility(formula, mod.tensors, blocks, torch.float32)


def visible_share(states: Tensor) -> Tensor:
    """The share of sequences and heads in which a block is not hidden, in float64."""
    # Counted as integers: the order of a sum changes nothing, so that all ranks have the same.
    return (states != HIDDEN).sum(dim=(0, 1)).cpu().double() / max(states.shape[0] * states.shape[1], 1)


def window_pairs(window: Window, document: Document, sizes: tuple[int, int]) -> Tensor:
    """The pairs of each block that the window leaves, from the keys of its first and its last row, in float64."""
    rows, keys = document
    lengths, widths = (lengths_of(*x) for x in zip(document, sizes, strict=True))
    first, start = (torch.arange(len(x)).double() * size for x, size in zip((lengths, widths), sizes, strict=True))
    diagonal, num_keys = (torch.full_like(first, n) for n in (keys.length - rows.length, keys.length))
    lo, _ = bounds(window, first, diagonal, num_keys)
    _, hi = bounds(window, first + lengths - 1, diagonal, num_keys)
    inside = (hi[:, None] > start) & (lo[:, None] < start + widths)
    return inside * torch.outer(lengths, widths)
