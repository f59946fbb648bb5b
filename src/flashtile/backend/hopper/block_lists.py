"""Lists of the blocks that a mask shows (`kernels.shared.block_lists`), made on the device, without reading a value on
the host. Those of a mask function are made in one or two launches; torch operations make those of a mask that is a
tensor, and of a function that reads an element for each pair.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call
from ...call.formulas import mask_formula
from ...expression import Formula
from ...expression.blocks import FULL, HIDDEN, PARTIAL, depends_on
from ..gpu.block_lists import Pairs, pairs_of, states_of_mask, visibility, window_states
from ..gpu.captured import needs_wide_offsets
from ..gpu.kernel import Kernel
from ..gpu.replay import Recorder
from ..scalars import window_numbers
from .formulas import VisibilityFunction, launch_with, visibility_function
from .tables import VisibleBlocksConfig

LEAST_PAIRS = 2**24  # of a call: computing fewer takes about as long as their lists
LEAST_MASK_PAIRS = 2**28  # of a call with a mask that is a tensor, whose lists take some twenty launches
MOST_PAIRS = 2**41  # offsets in lists have 32 bits
POSITIONS = 8192  # of keys that a program looks at together
NO_LISTS = dict.fromkeys(("stride_lists_b", "stride_lists_h", "stride_lists"))
VISIBLE_BLOCKS = Kernel(f"{__package__}.kernels.visible_blocks", "visible_blocks_kernel")
KEY_LISTS = Kernel(f"{__package__}.kernels.visible_blocks", "key_lists_kernel")


class Grid(NamedTuple):
    """Blocks of a call, and numbers of lists."""

    block_m: int
    block_n: int
    batch: int  # 1 if the mask does not depend on the sequence
    heads: int  # 1 if the mask does not depend on the head
    group: int  # heads that share a list, of a mask that depends on the head
    rows: int  # blocks
    keys: int


def row_lists(recorder: Recorder, call: Call, block_m: int, block_n: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pointer and the scalars of the lists of blocks of rows, whose entries are blocks of keys."""
    if not has_lists(call):
        return {"lists": None}, {**NO_LISTS}
    formula = mask_formula(call)
    function = function_of(call, formula)
    if formula is None or function is None:
        lists = of_states(recorder, call, block_m, block_n, listed_keys)
    else:
        grid = grid_of(call, formula, block_m, block_n, 1)
        shape = (1, grid.batch, grid.heads, grid.rows, grid.keys + 2)
        lists = visible_blocks(recorder, call, function, grid, shape)
    return {"lists": lists}, strides_of(lists)


def key_lists(
    recorder: Recorder, call: Call, block_m: int, block_n: int, *, first_key_first: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pointer and the scalars of the lists of blocks of keys, whose entries are blocks of rows, and of the ranks of
    the entries: how many blocks of keys add to this block of rows before, if blocks come in this order or its inverse.
    """
    if not has_lists(call):
        return {"lists": None}, {**NO_LISTS, "ranks": None}
    group = call.tensors.q.shape[1] // call.tensors.k.shape[1]
    formula = mask_formula(call)
    function = function_of(call, formula)
    if formula is None or function is None:
        lists = of_states(recorder, call, block_m, block_n, partial(listed_rows, group, first_key_first))
    else:
        grid = grid_of(call, formula, block_m, block_n, group)
        shape = (grid.batch, grid.heads, grid.rows, grid.keys + 1)
        table = visible_blocks(recorder, call, function, grid, shape, table=True)
        lists = of_table(recorder, table, grid, first_key_first)
    return {"lists": lists}, {**strides_of(lists), "ranks": lists.numel() // 2}


def has_lists(call: Call) -> bool:
    """Whether a call has lists, of the blocks that mask and window show; the kernels test the window's sides in blocks
    that they cut. Others compute all pairs that the window shows. With lists, kernels run one function of
    a score_mod in partly visible blocks and one in full ones, which are made with a mask function only.
    """
    function = call.settings.mask_mod is not None
    mask = call.tensors.mask is not None and call.settings.score_mod is None
    if not (function or mask) or call.layout != "dense":
        return False
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    least = LEAST_PAIRS if function else LEAST_MASK_PAIRS
    return max(least, 1) <= batch * heads * seqlen_q * call.tensors.k.shape[2] <= MOST_PAIRS


def grid_of(call: Call, formula: Formula, block_m: int, block_n: int, group: int) -> Grid:
    """The blocks of a call. Without dependence on the head all heads share a list, else `group` do."""
    batch, heads, seqlen_q, _ = call.tensors.q.shape
    batch = batch if depends_on(formula, "b") else 1
    heads, group = (heads // group, group) if depends_on(formula, "h") else (1, 1)
    rows, keys = -(-seqlen_q // block_m), -(-call.tensors.k.shape[2] // block_n)
    return Grid(block_m, block_n, batch, heads, group, rows, keys)


def strides_of(lists: Tensor) -> dict[str, int]:
    """Scalars of lists `[1 | 2, B | 1, H | 1, tiles, entries]`."""
    _, batch, heads, _, _ = lists.shape
    _, stride_b, stride_h, stride, _ = lists.stride()
    return {
        "stride_lists_b": stride_b if batch > 1 else 0,
        "stride_lists_h": stride_h if heads > 1 else 0,
        "stride_lists": stride,
    }


# Kernels --------------------------------------------------------------------------------------------------------------


def function_of(call: Call, formula: Formula | None) -> VisibilityFunction | None:
    """The device function of a mask function's blocks; `None` if it has none, or the mask is a tensor."""
    if formula is None:
        return None
    return visibility_function(formula, any(needs_wide_offsets(x) for x in call.tensors.score_mod_tensors))


def visible_blocks(
    recorder: Recorder, call: Call, function: VisibilityFunction, grid: Grid, shape: tuple[int, ...],
    table: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the kernel for lists, or for the table from which lists of blocks of keys are made."""
    t = call.tensors
    lists = recorder.new(t.q.new_empty(shape, dtype=torch.int32))
    blocks = min(1 << (grid.keys - 1).bit_length(), POSITIONS // grid.block_n)
    scalars = {
        "num_lists": grid.rows,
        "num_heads": grid.heads,
        "group": grid.group,
        "seqlen_q": t.q.shape[2],
        "seqlen_k": t.k.shape[2],
        "num_blocks": grid.keys,
        **window_numbers(call),
        "CONFIG": VisibleBlocksConfig(grid.block_m, grid.block_n, blocks, table),
        "num_warps": 8,
    }
    programs = grid.batch * grid.heads * grid.rows
    launch_with(recorder, call, VISIBLE_BLOCKS, {"lists": lists}, programs, scalars, function)
    return lists


def of_table(recorder: Recorder, table: Tensor, grid: Grid, first_key_first: bool) -> Tensor:
    """Launch the kernel for the lists of blocks of keys, and ranks."""
    shape = (2, grid.batch, grid.heads, grid.keys, grid.rows + 2)
    lists = recorder.new(table.new_empty(shape))
    scalars = {
        "ranks": lists.numel() // 2,
        "num_rows": grid.rows,
        "num_keys": grid.keys,
        "FIRST_KEY_FIRST": first_key_first,
        "BLOCKS": 256,
        "num_warps": 4,
    }
    recorder.launch(KEY_LISTS, {"table": table, "lists": lists}, grid.batch * grid.heads * grid.keys, scalars)
    return lists


# Torch operations -----------------------------------------------------------------------------------------------------


def of_states(recorder: Recorder, call: Call, block_m: int, block_n: int, make: Callable[[Tensor], Tensor]) -> Tensor:
    """Lists that a function makes of the states of blocks."""
    t, formula, pairs = call.tensors, mask_formula(call), pairs_of(call, block_m, block_n)
    if formula is None:
        return recorder.op(partial(made_of_mask, make, pairs), t.mask)
    return recorder.op(partial(made, make, formula, pairs, t.q.device), *t.score_mod_tensors)


def made(
    make: Callable[[Tensor], Tensor], formula: Formula, pairs: Pairs, device: torch.device, *tensors: Tensor
) -> Tensor:
    return make(in_window(visibility(formula, pairs, device, *tensors), pairs))


def made_of_mask(make: Callable[[Tensor], Tensor], pairs: Pairs, mask: Tensor) -> Tensor:
    return make(in_window(states_of_mask(pairs, mask), pairs))


def in_window(states: Tensor, pairs: Pairs) -> Tensor:
    """States of the mask's blocks, HIDDEN outside of the window."""
    return torch.where(window_states(pairs, states.device) == HIDDEN, HIDDEN, states)


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
