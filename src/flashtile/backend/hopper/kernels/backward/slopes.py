"""The gradient of ALiBi slopes: `-sum of ds * distance`, for each thread and block of keys; the host adds these up.

A thread adds to its own number in memory after each block of rows of another head, so that the order is fixed.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ... import tile_config
from ..shared.column_masks import all_visible, thread_view
from ..shared.distances import real_distances
from ..shared.mma import MMA_M

PARTS = gl.constexpr(tile_config.SLOPE_PARTS)


class SlopeGradient(NamedTuple):
    """Memory in which the parts are added up."""

    data: gl.tensor | None  # pointer, [splits * B * H, num_blocks, warpgroups, PARTS], or if packed [H, ...]; or `None`
    num_heads: gl.tensor
    num_blocks: gl.tensor


@gluon.jit
def add_slope_gradient(gradient, ds, block, tile, batch, warpgroup, PACKED: gl.constexpr, CONFIG: gl.constexpr):
    """Add the parts of a block `ds [N, M]` in fp32."""
    base, constant = real_distances(ds, block.first_row + block.shift - block.first_key, True)
    distance = gl.abs(base + constant)
    part = gl.sum(gl.sum(thread_view(ds * distance), 3), 1)
    if PACKED:
        head, first_block = block.head, tile.token_k // CONFIG.block_n + tile.b
    else:
        head, first_block = (tile.token_k * batch + tile.b) * gradient.num_heads + block.head, 0
    place = head.to(gl.int64) * gradient.num_blocks + (first_block + tile.first_key // CONFIG.block_n)
    layout: gl.constexpr = all_visible(ds).type.layout
    thread = 4 * gl.expand_dims(gl.arange(0, MMA_M, gl.SliceLayout(1, layout)), 1)
    thread += gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, layout)), 0)
    pointers = gradient.data + (2 * place + warpgroup) * PARTS + thread
    gl.store(pointers, gl.load(pointers) - gl.convert_layout(part, layout, assert_trivial=True))
