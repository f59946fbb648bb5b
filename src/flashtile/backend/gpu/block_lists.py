"""Lists of the blocks that kernels visit, by the window and by the mask, a function or a tensor: for each block of
rows its blocks of keys, or the other way round. They are made on the device, by operations that a CUDA graph can
contain.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...call.call import Call
from ...call.formulas import mask_formula
from ...call.problem import OCTET
from ...expression import Formula
from ...expression.blocks import (
    FULL,
    HIDDEN,
    PARTIAL,
    SUMMARY_BLOCK,
    Blocks,
    block_visibility,
    coarser,
    mask_visibility,
    positions,
)
from ..scalars import window_numbers
from .replay import Recorder

LEAST_PAIRS = 2**28  # pairs of a call: computing fewer takes about as long as their lists


class Range(NamedTuple):
    """Positions of one side of a call, or its sequences or heads."""

    first: int
    length: int

    def numbers(self, device: torch.device) -> Tensor:
        return torch.arange(self.first, self.first + self.length, device=device)


class Sides(NamedTuple):
    """The sides of a window, `None` where unlimited: key `j` of row `i` is within them if `i + shift - left <= j`,
    `j <= i + shift + right` and `j <= i + top_left`.
    """

    left: int | None
    right: int | None
    top_left: int | None
    shift: int


class Pairs(NamedTuple):
    """All pairs of a dense call, and the blocks that a kernel cuts them into."""

    sequences: Range
    heads: Range
    rows: Range
    keys: Range
    block_m: int
    block_n: int
    window: Sides


def block_lists(
    recorder: Recorder, call: Call, block_m: int, block_n: int, states: Tensor | None = None, *, of_keys: bool = False
) -> tuple[dict[str, Tensor | None], dict[str, int | None]]:
    """The pointer and the scalars of `parameters.BlockLists`; `of_keys` is for kernels that own blocks of keys. Packed
    calls, calls with chunks and small ones have no lists: their kernels visit all blocks that the window shows.
    `states` come from `summary`.
    """
    if not has_lists(call):
        return {"lists": None}, {f"stride_lists_{dim}": None for dim in "bhm"}
    t, formula, pairs = call.tensors, mask_formula(call), pairs_of(call, block_m, block_n)
    if formula is not None:
        of_function = partial(computed, formula, pairs, t.q.device, of_keys)
        read = t.score_mod_tensors
        lists = recorder.op(of_function, *read) if read else recorder.constant(of_function)
    elif states is not None:
        lists = recorder.op(partial(computed_of_states, pairs, of_keys), states)
    else:
        lists = recorder.op(partial(computed_of_mask, pairs, of_keys), t.mask)
    b, h, m, _ = (0 if n == 1 else stride for n, stride in zip(lists.shape, lists.stride(), strict=True))
    return {"lists": lists}, {"stride_lists_b": b, "stride_lists_h": h, "stride_lists_m": m}


def has_lists(call: Call) -> bool:
    """Whether a call's kernels visit the blocks in a list: long dense calls with a mask."""
    t, s = call.tensors, call.settings
    num_pairs = t.q.shape[0] * t.q.shape[1] * t.q.shape[2] * t.k.shape[-2] if call.layout == "dense" else 0
    from_first_key = s.dropout_p == 0 or s.j0 % OCTET == 0  # where blocks of keys begin
    masked = s.mask_mod is not None or t.mask is not None
    return masked and s.attention_chunk is None and from_first_key and num_pairs >= max(LEAST_PAIRS, 1)


def summary(recorder: Recorder, call: Call, block_m: int, block_n: int, known: Tensor | None = None) -> Tensor | None:
    """The states of a mask tensor's blocks, of `SUMMARY_BLOCK` rows and keys each: one pass over its elements for all
    kernels of forward and backward. `None` of calls without lists, or with a mask function, and for kernels with blocks
    that are no multiples. `known` comes from an earlier kernel.
    """
    t, multiples = call.tensors, block_m % SUMMARY_BLOCK == block_n % SUMMARY_BLOCK == 0
    if call.settings.mask_mod is not None or not multiples or not has_lists(call):
        return None
    if known is not None:
        return known
    return recorder.op(partial(states_of_mask, pairs_of(call, SUMMARY_BLOCK, SUMMARY_BLOCK)), t.mask)


def pairs_of(call: Call, block_m: int, block_n: int) -> Pairs:
    """The pairs of a dense call."""
    t, s = call.tensors, call.settings
    sequences, heads = Range(s.b0, t.q.shape[0]), Range(s.h0, t.q.shape[1])
    rows, keys, given = Range(s.i0, t.q.shape[2]), Range(s.j0, t.k.shape[2]), window_numbers(call)
    shift = keys.length - rows.length + given["diagonal"]
    window = Sides(given["window_left"], given["window_right"], given["top_left"], shift)
    return Pairs(sequences, heads, rows, keys, block_m, block_n, window)


def visibility(formula: Formula, pairs: Pairs, device: torch.device, *tensors: Tensor) -> Tensor:
    """States of the blocks, `[B | 1, H | 1, blocks of rows, blocks of keys]`."""
    blocks = Blocks(
        pairs.sequences.numbers(device),
        pairs.heads.numbers(device),
        positions(*pairs.rows, pairs.block_m, device),
        positions(*pairs.keys, pairs.block_n, device),
    )
    return block_visibility(formula, tensors, blocks, torch.float32)


def window_states(pairs: Pairs, device: torch.device) -> Tensor:
    """States of the blocks by the window, `[blocks of rows, blocks of keys]`."""
    left, right, top_left, shift = pairs.window
    first_row = torch.arange(0, pairs.rows.length, pairs.block_m, device=device)[:, None]
    first_key = torch.arange(0, pairs.keys.length, pairs.block_n, device=device)
    last_row = (first_row + pairs.block_m).clamp(max=pairs.rows.length) - 1
    last_key = (first_key + pairs.block_n).clamp(max=pairs.keys.length) - 1
    seen = full = (first_row >= 0) & (first_key >= 0)
    if left is not None:
        seen, full = seen & (last_key >= first_row + (shift - left)), full & (first_key >= last_row + (shift - left))
    for right_of_row in (None if right is None else shift + right, top_left):
        if right_of_row is not None:
            seen, full = seen & (first_key <= last_row + right_of_row), full & (last_key <= first_row + right_of_row)
    return torch.where(full, FULL, torch.where(seen, PARTIAL, HIDDEN)).to(torch.uint8)


def computed(formula: Formula, pairs: Pairs, device: torch.device, of_keys: bool, *tensors: Tensor) -> Tensor:
    """The lists of a mask function, as `listed`."""
    return listed(visibility(formula, pairs, device, *tensors), pairs, of_keys)


def computed_of_mask(pairs: Pairs, of_keys: bool, mask: Tensor) -> Tensor:
    """The lists of a mask `[B | 1, H | 1, Sq | 1, Sk | 1]`, as `listed`."""
    return listed(states_of_mask(pairs, mask), pairs, of_keys)


def computed_of_states(pairs: Pairs, of_keys: bool, states: Tensor) -> Tensor:
    """The lists of a mask whose `summary` is known, as `listed`."""
    blocks = (-(-x.length // SUMMARY_BLOCK) for x in (pairs.rows, pairs.keys))
    sizes = (pairs.block_m // SUMMARY_BLOCK, pairs.block_n // SUMMARY_BLOCK)
    return listed(coarser(states.expand(-1, -1, *blocks), *sizes), pairs, of_keys)


def states_of_mask(pairs: Pairs, mask: Tensor) -> Tensor:
    """States of the blocks, as `visibility`."""
    return mask_visibility(mask, pairs.rows.length, pairs.keys.length, pairs.block_m, pairs.block_n)


def listed(states: Tensor, pairs: Pairs, of_keys: bool) -> Tensor:
    """The lists of blocks in these states of the mask, and in the window, int32
    `[B | 1, H | 1, lists, 2 + entries]`: how many blocks are partly visible and how many full, then those that are
    partly visible, and then the full ones.
    """
    states = torch.minimum(states, window_states(pairs, states.device))  # HIDDEN < PARTIAL < FULL
    states = (states.mT if of_keys else states).contiguous()
    inner, size = (pairs.rows, pairs.block_m) if of_keys else (pairs.keys, pairs.block_n)
    if inner.length % size:  # the last block has positions that do not exist, which code for full blocks does not test
        states[..., -1].clamp_(max=PARTIAL)
    rank = (3 - states) % 3  # partly visible blocks first, then full ones, then hidden ones
    order = rank.sort(dim=-1, descending=True, stable=True).indices
    counts = torch.stack([(rank == 2).sum(dim=-1), (rank == 1).sum(dim=-1)], dim=-1)
    return torch.cat([counts, order], dim=-1).to(torch.int32)
