"""Lists of the blocks that a mask shows (`kernels.shared.block_lists`), made on the device, without reading a value on
the host: in one or two launches. The states of blocks of a mask that is a tensor take one more, which reads it once;
torch operations make the lists of a function that reads an element for each pair.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call
from ....call.formulas import mask_formula
from ....expression.blocks import SUMMARY_BLOCK, depends_on
from ....expression.blocks.dense import ALL_VISIBLE, WORD
from ...gpu.block_lists import pairs_of, visibility
from ...gpu.captured import needs_wide_offsets
from ...gpu.kernel import Kernel
from ...gpu.pointers import Described
from ...gpu.replay import Recorder
from ...scalars import window_numbers
from ..plan.listed import has_lists, has_pair_bits
from ..tile_config import Constexpr
from . import KERNELS
from .formulas import NO_INPUTS, DeviceFunction, launch_with, summaries_function, visibility_function
from .pair_bits import EntryQueue, PairBitsConfig, broadcast_strides, pair_bits
from .semaphores import take_entry_queue_semaphore

POSITIONS = 8192  # positions of keys that a program looks at together
LONG = 8192  # keys from which they are summarized once for all rows, in a launch of its own
SUMMARIZED = 1024  # keys of a program for summaries
MOST_BLOCKS, BLOCKS_OF_THREAD = 1024, 4  # with summaries
POSITIONS_OF_THREAD = 8  # with a mask function: straight code of more waits for its instructions
BLOCKS_AT_ONCE = 8  # blocks of keys, in a program that reads a mask
NO_POINTERS = {"lists": None, "mask_bits": None}
NO_LISTS = dict.fromkeys(("stride_lists_b", "stride_lists_h", "stride_lists_tile"))
MASK_STATES = Kernel(f"{KERNELS}.visible_blocks", "mask_states_kernel")
KEY_SUMMARIES = Kernel(f"{KERNELS}.visible_blocks", "key_summaries_kernel")
VISIBLE_BLOCKS = Kernel(f"{KERNELS}.visible_blocks", "visible_blocks_kernel")
KEY_LISTS = Kernel(f"{KERNELS}.visible_blocks", "key_lists_kernel")


@dataclass(frozen=True)
class VisibleBlocksConfig(Constexpr):
    """Kernel that lists visible blocks: tiles of `block_m` rows, and `blocks` blocks of `block_n` keys at once."""

    block_m: int
    block_n: int
    blocks: int
    table: bool  # for lists of blocks of keys
    row_parts: int = 1  # parts of a block that have states, of rows and of keys
    key_parts: int = 1
    summaries: int = 0  # numbers in memory that a mask function takes of a block of keys; 0: it reads positions
    score_mod: Any = None

    @property
    def row_positions(self) -> int:
        """Positions that stand for a tile's rows, a power of two: the last row again past them."""
        return 1 << (self.block_m - 1).bit_length()


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
    queue = new_queue(recorder, call, grid.batch * grid.heads * grid.rows * grid.keys)
    lists = visible_blocks(recorder, call, source, (1, grid.batch, grid.heads, grid.rows, grid.keys + 2), queue)
    return pointers_of(recorder, call, lists, queue, PairBitsConfig(block_m, block_n, False)), strides_of(lists)


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
    table = visible_blocks(recorder, call, source, (grid.batch, grid.heads, grid.rows, grid.keys + 1), None, table=True)
    queue = new_queue(recorder, call, grid.batch * grid.heads * grid.rows * grid.keys)
    lists = of_table(recorder, table, grid, queue, first_key_first)
    pointers = pointers_of(recorder, call, lists, queue, PairBitsConfig(block_n, block_m, True))
    return pointers, {**strides_of(lists), "ranks": lists.numel() // 2}


def pointers_of(
    recorder: Recorder, call: Call, lists: Tensor, queue: EntryQueue | None, config: PairBitsConfig
) -> dict[str, Any]:
    """The pointers of lists, and of the bits of pairs if the call has them."""
    bits = None if queue is None else pair_bits(recorder, call, lists, queue, config)
    return {"lists": lists, "mask_bits": bits}


def new_queue(recorder: Recorder, call: Call, entries: int) -> EntryQueue | None:
    """A queue with room for these entries, if pairs have bits."""
    q = call.tensors.q
    if not has_pair_bits(call):
        return None
    places = recorder.new(q.new_empty(entries, dtype=torch.int64))
    return EntryQueue(places, recorder.op(partial(take_entry_queue_semaphore, q.device)))


def queue_pointers(queue: EntryQueue | None) -> dict[str, Any]:
    return {"queue": None, "queue_size": None} if queue is None else queue._asdict()


def strides_of(lists: Tensor) -> dict[str, int]:
    """Scalars of lists `[1 | 2, B | 1, H | 1, tiles, entries]`."""
    _, batch, heads, _, _ = lists.shape
    _, stride_b, stride_h, stride, _ = lists.stride()
    return {
        "stride_lists_b": stride_b if batch > 1 else 0,
        "stride_lists_h": stride_h if heads > 1 else 0,
        "stride_lists_tile": stride,
    }


# Sources of lists -----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Source of the states of a mask's blocks: a device function, or a tensor `[B | 1, H | 1, parts of rows | 1,
    parts of keys | 1]` of the recorder, with these numbers of parts in a block. `summaries`, of the recorder too, are
    what the function takes of blocks of keys, `[B | 1, numbers, blocks]`; without them, it takes positions.
    """

    grid: Grid
    function: DeviceFunction | None
    states: Tensor | None
    parts: tuple[int, int]
    summaries: Tensor | None = None


def source_of(recorder: Recorder, call: Call, block_m: int, block_n: int, states: Tensor | None, group: int) -> Source:
    """The source of a call's lists, of `group` heads each. Without dependence on the head, all heads share a list."""
    t, formula = call.tensors, mask_formula(call)
    batch, heads, seqlen_q, _ = t.q.shape
    rows, keys = -(-seqlen_q // block_m), -(-t.k.shape[2] // block_n)
    function, parts, summaries = None, (1, 1), None
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
    if function is not None and not of_heads and keys * block_n > LONG:
        function, summaries = with_summaries(recorder, call, grid, function)
    return Source(grid, function, states, parts, summaries)


def with_summaries(
    recorder: Recorder, call: Call, grid: Grid, function: DeviceFunction
) -> tuple[DeviceFunction, Tensor | None]:
    """Launch the kernel for summaries of blocks of keys, which all blocks of rows share, and the function of them."""
    formula, wide = mask_formula(call), any(needs_wide_offsets(x) for x in call.tensors.score_mod_tensors)
    assert formula is not None
    found = summaries_function(formula, wide)
    stored = visibility_function(formula, wide, stored=True)
    if found is None or stored is None:
        return function, None
    of_keys, count = found
    summaries = recorder.new(call.tensors.q.new_empty((grid.batch, count, grid.keys), dtype=torch.int64))
    blocks = SUMMARIZED // grid.block_n
    scalars = {
        "seqlen_k": call.tensors.k.shape[2],
        "num_blocks": grid.keys,
        "CONFIG": VisibleBlocksConfig(grid.block_m, grid.block_n, blocks, False, summaries=count),
        "num_warps": SUMMARIZED // (32 * POSITIONS_OF_THREAD),
    }
    programs = grid.batch * -(-grid.keys // blocks)
    launch_with(recorder, call, KEY_SUMMARIES, {"summaries": summaries}, programs, scalars, of_keys)
    return stored, summaries


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
    recorder: Recorder, call: Call, source: Source, shape: tuple[int, ...], queue: EntryQueue | None, *,
    table: bool = False,
) -> Tensor:  # fmt: skip
    """Launch the kernel for lists, or for the table from which lists of blocks of keys are made."""
    t, (grid, function, states, parts, summaries) = call.tensors, source
    lists = recorder.new(t.q.new_empty(shape, dtype=torch.int32))
    blocks, warps = POSITIONS // grid.block_n, 8
    if summaries is not None:
        blocks = min(1 << (grid.keys - 1).bit_length(), MOST_BLOCKS)
        warps = max(4, blocks // (32 * BLOCKS_OF_THREAD))
    elif function is not None:  # which takes time at each position
        blocks = min(1 << (grid.keys - 1).bit_length(), blocks)
        warps = max(warps, blocks * grid.block_n // (32 * POSITIONS_OF_THREAD))
    strides = [None] * 4 if states is None else broadcast_strides(states)
    stored_numbers = 0 if summaries is None else summaries.shape[1]
    scalars = {
        **{f"stride_states_{dim}": stride for dim, stride in zip("bhmn", strides, strict=True)},
        "num_lists": grid.rows,
        "num_heads": grid.heads,
        "group": grid.group,
        "seqlen_q": t.q.shape[2],
        "seqlen_k": t.k.shape[2],
        "num_blocks": grid.keys,
        **window_numbers(call),
        "CONFIG": VisibleBlocksConfig(grid.block_m, grid.block_n, blocks, table, *parts, summaries=stored_numbers),
        "num_warps": warps,
    }
    programs, pointers = grid.batch * grid.heads * grid.rows, {"lists": lists, "states": states, "summaries": summaries}
    pointers |= queue_pointers(queue)
    if function is None:
        recorder.launch(VISIBLE_BLOCKS, pointers, programs, scalars | NO_INPUTS)
    else:
        launch_with(recorder, call, VISIBLE_BLOCKS, pointers, programs, scalars, function)
    return lists


def of_table(recorder: Recorder, table: Tensor, grid: Grid, queue: EntryQueue | None, first_key_first: bool) -> Tensor:
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
    pointers = {"table": table, "lists": lists, **queue_pointers(queue)}
    recorder.launch(KEY_LISTS, pointers, grid.batch * grid.heads * grid.keys, scalars)
    return lists
