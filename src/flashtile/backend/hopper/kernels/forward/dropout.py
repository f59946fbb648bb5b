"""Bits of dropout in the forward kernel, from a warpgroup of its own: its integers overlap what the consumers wait for."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.block_lists import block_at, load_entry
from ..shared.column_masks import all_visible
from ..shared.dropout import kept_pairs, load_stream
from ..shared.mma import MMA_M
from ..shared.pipeline import make_mbarriers, stage_of, wraps_of
from ..shared.tile_scheduler import pop_tile
from .key_order import block_of_step, first_block


class DropoutBits(NamedTuple):
    """The bits of `dropout.kept_pairs`, for each stage and warpgroup."""

    data: gl.shared_memory_descriptor  # [STAGES * NUM_WARPGROUPS, MMA_M, 4] int32
    full: gl.shared_memory_descriptor  # [STAGES * NUM_WARPGROUPS, 1] mbarriers
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_dropout_bits(CONFIG: gl.constexpr):
    """Buffers of the bits, in a tuple; an empty one where the consumers make them."""
    if CONFIG.dropout_stages == 0:
        return ()
    else:
        SLOTS: gl.constexpr = CONFIG.dropout_stages * CONFIG.num_warpgroups
        layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        data = gl.allocate_shared_memory(gl.int32, [SLOTS, MMA_M, 4], layout)
        return (DropoutBits(data, make_mbarriers(SLOTS, 1), make_mbarriers(SLOTS, 1)),)


@gluon.jit
def dropout_warpgroup(context, CONFIG: gl.constexpr):
    """The partition that makes the bits of all consumer warpgroups."""
    bits, dropout, queue, lists = context.pipelines.dropout[0], context.dropout, context.queue, context.lists
    stream = load_stream(dropout)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.block_n, 16])
    scores = gl.zeros([MMA_M, CONFIG.block_n], gl.float32, layout)
    count = 0
    tile_count = 0
    tile = pop_tile(queue, 0)
    while tile.b >= 0:
        first = first_block(tile, context.params.inputs, CONFIG)
        for step in range(tile.hi - tile.lo):
            n = tile.hi - 1 - step
            block = block_at(lists, block_of_step(n, first, tile, CONFIG), load_entry(lists, tile.token_k, n))
            for warpgroup in range(CONFIG.num_warpgroups):
                first_row = tile.first_row + warpgroup * MMA_M
                kept = kept_pairs(
                    dropout, stream, tile.b, tile.head, first_row, block * CONFIG.block_n, scores, False
                )  # fmt: skip
                slot = dropout_slot(count, warpgroup, CONFIG)
                mbarrier.wait(bits.empty.index(slot), (wraps_of(count, CONFIG.dropout_stages) & 1) ^ 1)
                bits.data.index(slot).store(kept[0])
                mbarrier.arrive(bits.full.index(slot), count=1)
            count += 1
        tile_count += 1
        tile = pop_tile(queue, tile_count)


@gluon.jit
def read_kept_pairs(bits, count, warpgroup, x, CONFIG: gl.constexpr):
    """The bits of a step for the scores `x` of a warpgroup."""
    slot = dropout_slot(count, warpgroup, CONFIG)
    mbarrier.wait(bits.full.index(slot), wraps_of(count, CONFIG.dropout_stages) & 1)
    kept = bits.data.index(slot).load(all_visible(x).type.layout)
    mbarrier.arrive(bits.empty.index(slot), count=1)
    return (kept,)


@gluon.jit
def dropout_slot(count, warpgroup, CONFIG: gl.constexpr):
    return stage_of(count, CONFIG.dropout_stages) * CONFIG.num_warpgroups + warpgroup
