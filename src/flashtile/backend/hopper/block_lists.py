"""Lists of the blocks that a mask shows (`kernels.shared.block_lists`), made on the device, without reading a value on
the host: in one or two launches. The states of blocks of a mask that is a tensor take one more, which reads it once;
torch operations make those of a function that reads an element for each pair.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call
from ...call.formulas import mask_formula
from ...expression.blocks import SUMMARY_BLOCK, depends_on
from ...expression.blocks.dense import ALL_VISIBLE, WORD
from ..gpu.block_lists import pairs_of, visibility
from ..gpu.captured import needs_wide_offsets
from ..gpu.kernel import Kernel
from ..gpu.pointers import Described
from ..gpu.replay import Recorder
from ..scalars import window_numbers
from .formulas import DeviceFunction, launch_with, visibility_function
from .listed import has_lists, has_pair_bits
from .pair_bits import broadcast_strides, pair_bits
from .tile_config import PairBitsConfig, VisibleBlocksConfig

POSITIONS = 8192  # of keys that a program looks at together
POSITIONS_OF_THREAD = 8  # with a mask function: straight code of more waits for its instructions
BLOCKS_AT_ONCE = 8  # of keys, in a program that reads a mask
NO_POINTERS = {"lists": None, "mask_bits": None}
NO_LISTS = dict.fromkeys(("stride_lists_b", "stride_lists_h", "stride_lists"))
MASK_STATES = Kernel(f"{__package__}.kernels.visible_blocks", "mask_states_kernel")
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


def row_lists(
    recorder: Recorder, call: Call, block_m: int, block_n: int, states: Tensor | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pointers and the scalars of the lists of blocks of rows, whose entries are blocks of keys. `states` are those
    of `mask_states`.
    """
    if not has_lists(call):
        return {**NO_POINTERS}, {**NO_LISTS}
    source = source_of(recorder, call, block_m, block_n, states, 1)
    grid = source.grid
    lists = visible_blocks(recorder, call, source, (1, grid.batch, grid.heads, grid.rows, grid.keys + 2))
    return pointers_of(recorder, call, lists, PairBitsConfig(block_m, block_n, False)), strides_of(lists)


def key_lists(
    recorder: Recorder, call: Call, block_m: int, block_n: int, states: Tensor | None, *, first_key_first: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pointers and the scalars of the lists of blocks of keys, whose entries are blocks of rows, and of the ranks
    of the entries: how many blocks of keys add to this block of rows before, if blocks come in this order or its
    inverse.
    """
    if not has_lists(call):
        return {**NO_POINTERS}, {**NO_LISTS, "ranks": None}
    source = source_of(recorder, call, block_m, block_n, states, call.tensors.q.shape[1] // call.tensors.k.shape[1])
    grid = source.grid
    table = visible_blocks(recorder, call, source, (grid.batch, grid.heads, grid.rows, grid.keys + 1), table=True)
    lists = of_table(recorder, table, grid, first_key_first)
    pointers = pointers_of(recorder, call, lists, PairBitsConfig(block_n, block_m, True))
    return pointers, {**strides_of(lists), "ranks": lists.numel() // 2}


def pointers_of(recorder: Recorder, call: Call, lists: Tensor, config: PairBitsConfig) -> dict[str, Any]:
    """The pointers of lists, and of the bits of pairs if the call has them."""
    bits = pair_bits(recorder, call, lists, config) if has_pair_bits(call) else None
    return {"lists": lists, "mask_bits": bits}


def strides_of(lists: Tensor) -> dict[str, int]:
    """Scalars of lists `[1 | 2, B | 1, H | 1, tiles, entries]`."""
    _, batch, heads, _, _ = lists.shape
    _, stride_b, stride_h, stride, _ = lists.stride()
    return {
        "stride_lists_b": stride_b if batch > 1 else 0,
        "stride_lists_h": stride_h if heads > 1 else 0,
        "stride_lists": stride,
    }


# Sources of lists -----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Source of the states of a mask's blocks: a device function, or a tensor `[B | 1, H | 1, parts of rows | 1,
    parts of keys | 1]` of the recorder, with these numbers of parts in a block.
    """

    grid: Grid
    function: DeviceFunction | None
    states: Tensor | None
    parts: tuple[int, int]


def source_of(recorder: Recorder, call: Call, block_m: int, block_n: int, states: Tensor | None, group: int) -> Source:
    """The source of a call's lists, of `group` heads each. Without dependence on the head, all heads share a list."""
    t, formula = call.tensors, mask_formula(call)
    batch, heads, seqlen_q, _ = t.q.shape
    rows, keys = -(-seqlen_q // block_m), -(-t.k.shape[2] // block_n)
    function, parts = None, (1, 1)
    if formula is None:
        assert states is not None
        of_sequences, of_heads = (n > 1 for n in states.shape[:2])
        parts = block_m // SUMMARY_BLOCK, block_n // SUMMARY_BLOCK
    else:
        function = visibility_function(formula, any(needs_wide_offsets(x) for x in t.score_mod_tensors))
        of_sequences, of_heads = depends_on(formula, "b"), depends_on(formula, "h")
        if function is None:
            pairs = pairs_of(call, block_m, block_n)
            states = recorder.op(partial(visibility, formula, pairs, t.q.device), *t.score_mod_tensors)
    heads, group = (heads // group, group) if of_heads else (1, 1)
    grid = Grid(block_m, block_n, batch if of_sequences else 1, heads, group, rows, keys)
    return Source(grid, function, states, parts)


def mask_states(recorder: Recorder, call: Call) -> Tensor | None:
    """The states of a mask tensor's blocks, as `gpu.block_lists.summary`; broadcast dimensions have one block."""
    if call.settings.mask_mod is not None or not has_lists(call):
        return None
    assert call.tensors.mask is not None
    return states_of_mask(recorder, call.tensors.mask)


def states_of_mask(recorder: Recorder, mask: Tensor) -> Tensor:
    """Launch the kernel that reads a mask `[B | 1, H | 1, Sq | 1, Sk | 1]`, whose keys are contiguous. Expanded
    dimensions count as broadcast ones.
    """
    sizes = [1 if stride == 0 else n for n, stride in zip(mask.shape, mask.stride(), strict=True)]
    strides = [0 if n == 1 else stride for n, stride in zip(sizes, mask.stride(), strict=True)][:3]
    in_words = all(n % WORD == 0 for n in (sizes[3], mask.storage_offset(), *strides))
    word = WORD if in_words else 1
    batch, heads, rows, keys = sizes
    blocks = -(-rows // SUMMARY_BLOCK), -(-keys // SUMMARY_BLOCK)
    states = recorder.new(mask.new_empty((batch, heads, *blocks), dtype=torch.uint8))
    scalars = {
        **{f"stride_mask_{dim}": stride // word for dim, stride in zip("bhm", strides, strict=True)},
        "num_heads": heads,
        "num_rows": rows,
        "num_words": keys // word,
        "row_blocks": blocks[0],
        "key_blocks": blocks[1],
        "BLOCK_M": SUMMARY_BLOCK if rows > 1 else 1,
        "BLOCK_WORDS": SUMMARY_BLOCK // word if keys > 1 else 1,
        "BLOCKS": BLOCKS_AT_ONCE,
        "ALL_VISIBLE": ALL_VISIBLE if in_words else 1,
        "num_warps": 4,
    }
    pointers = {"mask": Described(mask, Tensor.view, torch.int64 if in_words else torch.uint8), "states": states}
    programs = batch * heads * blocks[0] * -(-blocks[1] // BLOCKS_AT_ONCE)
    recorder.launch(MASK_STATES, pointers, programs, scalars)
    return states


def visible_blocks(
    recorder: Recorder, call: Call, source: Source, shape: tuple[int, ...], table: bool = False
) -> Tensor:
    """Launch the kernel for lists, or for the table from which lists of blocks of keys are made."""
    t, (grid, function, states, parts) = call.tensors, source
    lists = recorder.new(t.q.new_empty(shape, dtype=torch.int32))
    blocks, warps = POSITIONS // grid.block_n, 8
    if function is not None:  # which takes time at each position
        blocks = min(1 << (grid.keys - 1).bit_length(), blocks)
        warps = max(warps, blocks * grid.block_n // (32 * POSITIONS_OF_THREAD))
    strides = [None] * 4 if states is None else broadcast_strides(states)
    scalars = {
        **{f"stride_states_{dim}": stride for dim, stride in zip("bhmn", strides, strict=True)},
        "num_lists": grid.rows,
        "num_heads": grid.heads,
        "group": grid.group,
        "seqlen_q": t.q.shape[2],
        "seqlen_k": t.k.shape[2],
        "num_blocks": grid.keys,
        **window_numbers(call),
        "CONFIG": VisibleBlocksConfig(grid.block_m, grid.block_n, blocks, table, *parts),
        "num_warps": warps,
    }
    programs, pointers = grid.batch * grid.heads * grid.rows, {"lists": lists, "states": states}
    if function is None:
        recorder.launch(VISIBLE_BLOCKS, pointers, programs, {**scalars, "inputs": None})
    else:
        launch_with(recorder, call, VISIBLE_BLOCKS, pointers, programs, scalars, function)
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
