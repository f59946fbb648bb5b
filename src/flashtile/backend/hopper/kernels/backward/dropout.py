"""The partition of the fused backward kernel that makes the bits of dropout."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..shared.block_lists import block_at, load_entry
from ..shared.dropout import kept_pairs, load_stream
from ..shared.dropout_bits import write_bits
from ..shared.mma import MMA_M
from .scores import block_coord
from .tile_scheduler import first_m_block, next_m_block, pop_key_tile


@gluon.jit
def dropout_warpgroup(context, CONFIG: gl.constexpr):
    """The partition that makes the bits of both consumer warpgroups."""
    bits, dropout, lists, group = context.bits[0], context.dropout, context.lists, context.group
    stream = load_stream(dropout)
    BLOCK_M: gl.constexpr = CONFIG.block_m
    WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    scores = gl.zeros([MMA_M, BLOCK_M], gl.float32, layout)
    count = 0
    tile_count = 0
    tile = pop_key_tile(context.queue, 0)
    while tile.b >= 0:
        m, group_head = first_m_block(tile, CONFIG.lpt), 0
        for _ in range(group * (tile.hi - tile.lo)):
            row_block = block_at(lists, m, load_entry(lists, tile.token_q, m))
            for warpgroup in range(WARPGROUPS):
                first_key = tile.first_key + warpgroup * MMA_M
                x = block_coord(tile, group, group_head, row_block, first_key, (), CONFIG)
                kept = kept_pairs(dropout, stream, x.b, x.head, x.first_row, first_key, scores, True)
                write_bits(bits, kept, count, warpgroup, CONFIG)
            count += 1
            m, group_head = next_m_block(m, group_head, tile, group, CONFIG.lpt)
        tile_count += 1
        tile = pop_key_tile(context.queue, tile_count)
