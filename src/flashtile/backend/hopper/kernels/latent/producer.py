"""The producer warp of latent attention, and the memory that it fills."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.compat import tma_load
from ..shared.pipeline import (
    FIRST_BARRIER,
    NamedBarriers,
    SmemBuffers,
    allocate_chunks,
    as_matrix,
    consumer_release,
    make_mbarriers,
    producer_acquire,
    slice_columns,
)
from ..shared.ptx import opaque
from .rows import block_coord, page_of, tile_of_program

CHUNKS = gl.constexpr(4)  # of the values' columns, two for each warpgroup; one more has the other columns
# By warpgroup: chunks in the order in which scores take them. The first one comes with the other columns.
ORDER = gl.constexpr(((0, 2, 1, 3), (2, 0, 3, 1)))
THREADS = gl.constexpr(128 + 32)  # a warpgroup and the producer


class Block(NamedTuple):
    """Shared memory for a block of keys, whose chunks are loaded and released one by one."""

    data: tuple[gl.shared_memory_descriptor, ...]  # for each chunk, [1, *rows, chunk]
    full: tuple[gl.shared_memory_descriptor, ...]  # for each chunk of values, [1, 1] mbarriers


class LatentBuffers(NamedTuple):
    """q, and two blocks: warpgroup n computes the scores of block n of each pair."""

    q: SmemBuffers
    blocks: tuple[Block, Block]


@gluon.jit
def make_block(desc, HEAD_DIM: gl.constexpr):
    full = ()
    for _ in gl.static_range(CHUNKS):  # waits for barriers of one array would synchronize the warpgroup
        full = full + (make_mbarriers(1, 1),)
    return Block(allocate_chunks(desc, 1, HEAD_DIM), full)


@gluon.jit
def empty_barrier(n: gl.constexpr, c: gl.constexpr):
    """The named barrier of a chunk, which has one reader in the end: the warpgroup of its columns."""
    return NamedBarriers(FIRST_BARRIER + n * CHUNKS + c, THREADS)


@gluon.jit
def release(n: gl.constexpr, c: gl.constexpr):
    consumer_release(empty_barrier(n, c), 0, 1)


@gluon.jit
def wait_chunk(block, c: gl.constexpr, count):
    """Wait for load number `count` of a chunk."""
    mbarrier.wait(block.full[c].index(0), count & 1)


@gluon.jit
def matrix(chunk):
    """A chunk as a matrix. There are no registers for precomputed addresses of all chunks."""
    return as_matrix(chunk.index(opaque(0)))


@gluon.jit
def producer_warp(q_desc, k_desc, buffers, rows, keys, CONFIG: gl.constexpr):
    """The partition that loads q and keys."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    tile = tile_of_program(rows, keys, CONFIG)
    mbarrier.expect(buffers.q.full.index(0), HEAD_DIM.num_boxes * q_desc.block_type.nbytes)
    for c in gl.static_range(CHUNKS + 1):
        load_columns(q_desc, buffers.q.data[c], buffers.q.full.index(0), (tile.b, 0, tile.first_row, 0), c, HEAD_DIM)
    first_page = page_of(keys, tile, 2 * tile.lo, CONFIG)
    second_page = page_of(keys, tile, 2 * tile.lo + 1, CONFIG)
    for n in range(tile.lo, tile.hi):
        first = block_coord(keys, tile, 2 * n, first_page, CONFIG)
        second = block_coord(keys, tile, 2 * n + 1, second_page, CONFIG)
        first_page = page_of(keys, tile, 2 * n + 2, CONFIG)
        second_page = page_of(keys, tile, 2 * n + 3, CONFIG)
        load_block(k_desc, buffers.blocks[0], first, n - tile.lo, 0, HEAD_DIM)
        load_block(k_desc, buffers.blocks[1], second, n - tile.lo, 1, HEAD_DIM)


@gluon.jit
def load_block(desc, block, coord, count, n: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Load the chunks of a block, as soon as each one's memory is empty."""
    for place in gl.static_range(CHUNKS):
        load_chunk(desc, block, coord, count, n, ORDER[n][place], place == 0, HEAD_DIM)


@gluon.jit
def load_chunk(
    desc, block, coord, count, n: gl.constexpr, c: gl.constexpr, WITH_REST: gl.constexpr, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Load a chunk, and with it the columns that are no values."""
    REST: gl.constexpr = HEAD_DIM.chunks[CHUNKS] if WITH_REST else 0
    full = block.full[c].index(0)
    producer_acquire(empty_barrier(n, c), count, 1)
    mbarrier.expect(full, (HEAD_DIM.chunks[c] + REST) // HEAD_DIM.box * desc.block_type.nbytes)
    if WITH_REST:
        load_columns(desc, block.data[CHUNKS], full, coord, CHUNKS, HEAD_DIM)
    load_columns(desc, block.data[c], full, coord, c, HEAD_DIM)


@gluon.jit
def load_columns(desc, smem, full, coord, c: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start the loads of a chunk."""
    BOX: gl.constexpr = HEAD_DIM.box
    for n in gl.static_range(HEAD_DIM.chunks[c] // BOX):
        box_coord = coord[:-1] + (HEAD_DIM.offsets[c] + n * BOX,)
        tma_load(desc, box_coord, full, slice_columns(smem.index(0), n * BOX, BOX))
