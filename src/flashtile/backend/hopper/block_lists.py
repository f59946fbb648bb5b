"""Lists of the blocks that a mask function shows (`kernels.shared.block_lists`), made on the device, by operations that
a CUDA graph can contain.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call.call import Call
from ...call.formulas import mask_formula
from ...expression import Formula
from ...expression.blocks import FULL, HIDDEN, PARTIAL
from ..gpu.block_lists import Pairs, pairs_of, visibility
from ..gpu.replay import Recorder

LEAST_PAIRS = 2**26  # of a call: computing fewer takes about as long as their lists
NO_LISTS = dict.fromkeys(("stride_lists_b", "stride_lists_h", "stride_lists"))


def row_lists(recorder: Recorder, call: Call, block_m: int, block_n: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pointer and the scalars of the lists of blocks of rows, whose entries are blocks of keys."""
    return lists_of(recorder, call, block_m, block_n, listed_keys)


def key_lists(
    recorder: Recorder, call: Call, block_m: int, block_n: int, *, first_key_first: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pointer and the scalars of the lists of blocks of keys, whose entries are blocks of rows, and of the ranks of
    the entries: how many blocks of keys add to this block of rows before, if blocks come in this order or its inverse.
    """
    group = call.tensors.q.shape[1] // call.tensors.k.shape[1]
    make = partial(listed_rows, group, first_key_first)
    pointers, scalars = lists_of(recorder, call, block_m, block_n, make)
    lists = pointers["lists"]
    return pointers, {**scalars, "ranks": None if lists is None else lists.numel() // 2}


def lists_of(
    recorder: Recorder, call: Call, block_m: int, block_n: int, make: Callable[[Tensor], Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pointer and the scalars of lists; of calls that have none, `None`."""
    formula = mask_formula(call)
    if formula is None or not has_lists(call):
        return {"lists": None}, {**NO_LISTS}
    pairs = pairs_of(call, block_m, block_n)
    lists = recorder.op(partial(made, make, formula, pairs, call.tensors.q.device), *call.tensors.score_mod_tensors)
    _, batch, heads, _, _ = lists.shape
    _, stride_b, stride_h, stride, _ = lists.stride()
    strides = {"stride_lists_b": stride_b if batch > 1 else 0, "stride_lists_h": stride_h if heads > 1 else 0}
    return {"lists": lists}, {**strides, "stride_lists": stride}


def has_lists(call: Call) -> bool:
    """Whether a call with a mask function has lists. Others compute all pairs that the window shows."""
    if call.layout != "dense" or not call.settings.window.unlimited:
        return False
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    return batch * heads * seqlen_q * call.tensors.k.shape[2] >= max(LEAST_PAIRS, 1)


def made(
    make: Callable[[Tensor], Tensor], formula: Formula, pairs: Pairs, device: torch.device, *tensors: Tensor
) -> Tensor:
    """The lists that a function makes of the states of blocks."""
    return make(visibility(formula, pairs, device, *tensors))


def listed_keys(states: Tensor) -> Tensor:
    """Lists `[1, B | 1, H | 1, blocks of rows, 2 + blocks of keys]` of visible blocks. A list without any has the block
    after the last key, as a tile has at least one.
    """
    lists = listed(states, torch.arange(states.shape[-1], device=states.device))
    empty = lists[..., 0] == 0
    lists[..., 1] = torch.where(empty, 2 * states.shape[-1] + 1, lists[..., 1])
    lists[..., 0] += empty
    return lists[None]


def listed_rows(group: int, first_key_first: bool, states: Tensor) -> Tensor:
    """Lists and ranks `[2, B | 1, Hk | 1, blocks of keys, 2 + blocks of rows]`."""
    if states.shape[1] > 1:  # one list for all query heads of a key head
        of_groups = states.unflatten(1, (-1, group))
        low, high = of_groups.amin(dim=2), of_groups.amax(dim=2)
        states = torch.where(low == high, low, PARTIAL)
    visible = (states != HIDDEN).to(torch.int32)
    before = visible.cumsum(dim=-1) if first_key_first else visible.flip(-1).cumsum(dim=-1).flip(-1)
    states = states.mT
    lists = listed(states, torch.arange(states.shape[-1], device=states.device))
    return torch.stack([lists, listed(states, (before - 1).mT, encode=False)])


def listed(states: Tensor, x: Tensor, encode: bool = True) -> Tensor:
    """The numbers of visible blocks, then `x` of those, then what is never read."""
    visible = states != HIDDEN
    order = visible.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    x = (2 * x + (states != FULL)) if encode else x
    entries = x.expand(states.shape).gather(-1, order)
    counts = visible.sum(dim=-1, keepdim=True)
    return torch.cat([counts, entries, torch.zeros_like(counts)], dim=-1).to(torch.int32)
