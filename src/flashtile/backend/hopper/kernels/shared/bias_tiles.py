"""Tiles of a bias in shared memory, loaded by TMA: a thread then reads its elements in the layout of scores, transposed
ones too, without the addresses and the narrow loads of `pairs`.

Each warpgroup has tiles of its own. Both barriers of a tile are mbarriers, as named barriers are used up in backward.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import thread_barrier, tma_load
from .pipeline import allocate_boxes, as_matrix, make_mbarriers, stage_of, wraps_of


class BiasTiles(NamedTuple):
    """Tiles of `warpgroups` warpgroups, in CONFIG.bias_stages stages. Use number `count` takes stage
    `count % bias_stages`.
    """

    data: gl.shared_memory_descriptor  # [tiles, 1, 1, rows, keys]
    full: gl.shared_memory_descriptor  # [tiles, 1] mbarriers
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_bias_tiles(bias_desc, WARPGROUPS: gl.constexpr, CONFIG: gl.constexpr):
    """Tiles, or an empty tuple where the kernel reads a bias by itself, or has none."""
    if bias_desc is None:
        return ()
    else:
        TILES: gl.constexpr = WARPGROUPS * CONFIG.bias_stages
        data = allocate_boxes(bias_desc, TILES, bias_desc.block_type.shape[-1])
        return (BiasTiles(data, make_mbarriers(TILES, 1), make_mbarriers(TILES, 1)),)


@gluon.jit
def load_bias_tile(
    bias_desc, tiles, params, b, head, row, key, count, warpgroup: gl.constexpr, WARPGROUPS: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Start the load of a warpgroup's tile number `count`, whose first row and key are given, as soon as the last one
    in its stage has been read. `params` are the `PairTensor` of the bias.
    """
    STAGES: gl.constexpr = CONFIG.bias_stages
    tile = stage_of(count, STAGES) * WARPGROUPS + warpgroup
    mbarrier.wait(tiles.empty.index(tile), (wraps_of(count, STAGES) & 1) ^ 1)
    mbarrier.expect(tiles.full.index(tile), bias_desc.block_type.nbytes)
    sequence, of_head = gl.where(params.stride_b == 0, 0, b), gl.where(params.stride_h == 0, 0, head)
    tma_load(bias_desc, (sequence, of_head, row, key), tiles.full.index(tile), tiles.data.index(tile))


@gluon.jit
def read_bias_tile(
    tiles, count, exists, warpgroup: gl.constexpr, TRANSPOSED: gl.constexpr, layout: gl.constexpr,
    WARPGROUPS: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """A warpgroup's tile number `count` in a layout of registers. Each one has to be read once; of one that does not
    exist, the results are any numbers.
    """
    STAGES: gl.constexpr = CONFIG.bias_stages
    tile = stage_of(count, STAGES) * WARPGROUPS + warpgroup
    mbarrier.wait(tiles.full.index(tile), wraps_of(count, STAGES) & 1, pred=exists)
    smem = as_matrix(tiles.data.index(tile))
    values = smem.permute([1, 0]).load(layout) if TRANSPOSED else smem.load(layout)
    thread_barrier()
    mbarrier.arrive(tiles.empty.index(tile), count=1, pred=exists)
    return values
