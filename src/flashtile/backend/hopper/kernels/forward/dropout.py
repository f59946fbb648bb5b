"""The partition of the forward kernel that makes the bits of dropout."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.block_lists import block_at, load_entry
from ..shared.dropout import kept_pairs, load_stream
from ..shared.dropout_bits import write_bits
from ..shared.mma import MMA_M
from ..shared.tile_scheduler import pop_tile
from .key_order import block_of_step, first_block


@gluon.jit
def dropout_warpgroup(context, CONFIG: gl.constexpr):
    """The partition that makes the bits of all consumer warpgroups."""
    bits, dropout, lists = context.pipelines.dropout[0], context.dropout, context.lists
    stream = load_stream(dropout)
    BLOCK_N: gl.constexpr = CONFIG.block_n
    WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    scores = gl.zeros([MMA_M, BLOCK_N], gl.float32, layout)
    count = 0  # steps of the main loop
    tile_count = 0
    tile = pop_tile(context.queue, 0)
    while tile.b >= 0:
        first = first_block(tile, context.params.inputs, CONFIG)
        for step in range(tile.hi - tile.lo):
            n = tile.hi - 1 - step
            block = block_at(lists, block_of_step(n, first, tile, CONFIG), load_entry(lists, tile.token_k, n))
            first_key = block * BLOCK_N
            for warpgroup in range(WARPGROUPS):
                first_row = tile.first_row + warpgroup * MMA_M
                kept = kept_pairs(dropout, stream, tile.b, tile.head, first_row, first_key, scores, False)
                write_bits(bits, kept, count, warpgroup, CONFIG)
            count += 1
        tile_count += 1
        tile = pop_tile(context.queue, tile_count)
