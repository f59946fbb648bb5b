"""Shared memory of latent rows of 8 bits, the warp that fills it, and the queries of a tile."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..latent.rows import LatentTile, block_coord, head_of, page_of, query_of, tile_of_program, visible_stop
from ..shared.compat import Pointer, Scalar, reinterpret_smem, tma_load
from ..shared.epilogue import ALIGN
from ..shared.mma import MMA_M
from ..shared.pipeline import (
    FIRST_BARRIER,
    NamedBarriers,
    allocate_boxes,
    as_matrix,
    make_mbarriers,
    producer_acquire,
    stage_of,
)
from ..shared.ptx import opaque
from ..shared.softmax import FLOAT_MAX
from .operands import CHUNK, CHUNKS, HALF, REST, in_words, key_operand, operand_layout

THREADS = gl.constexpr((128 + 32, 256 + 32))  # of one or two warpgroups and the producer
ROW_SCALES = gl.constexpr(4)  # of rows of 656 bytes, one for each chunk
LARGEST_EXPONENT = gl.constexpr(14)  # of queries in float16, which hold numbers below 2 ** 15


class Queries(NamedTuple):
    """`[B, H, S, D]`; strides are in units of ALIGN elements."""

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar
    stride_m: Scalar


class Ring(NamedTuple):
    """Stages of blocks of 64 keys as they are in memory."""

    latent: gl.shared_memory_descriptor  # [CHUNKS * stages, 1, 1, 1, 64, CHUNK]
    rest: gl.shared_memory_descriptor  # [stages, 1, 1, 1, 64, bytes of the other features]
    scales: tuple[gl.shared_memory_descriptor, ...]  # of rows of 656 bytes one, [stages, 1, 1, 1, 64, 16]
    full: gl.shared_memory_descriptor  # [stages, 1] mbarriers


class TileQueries(NamedTuple):
    """Queries in shared memory, each row times a power of two that makes its largest number about 2 ** 14: float16
    then loses nothing of bfloat16 but what is 2 ** 38 times smaller. For rows of 656 bytes, in their own dtype.
    """

    latent: gl.shared_memory_descriptor  # [CHUNKS, N, CHUNK], features `in_words`
    rest: gl.shared_memory_descriptor  # [1, N, REST] the same; for rows of 656 bytes in order
    factors: gl.shared_memory_descriptor  # [N] fp32: one over the power of two
    stops: gl.shared_memory_descriptor  # [N] int32: where a row's keys end


@gluon.jit
def tile_of(rows, keys, CONFIG: gl.constexpr):
    """A program's tile, whose blocks are counted one by one."""
    BLOCKS: gl.constexpr = CONFIG.block_n // MMA_M
    tile = tile_of_program(rows, keys, CONFIG)
    first_row = tile.first_row // MMA_M * CONFIG.block_m
    return LatentTile(tile.b, tile.split, first_row, BLOCKS * tile.lo, BLOCKS * tile.hi, tile.seqlen_k)


@gluon.jit
def make_ring(k_desc, rest_desc, scales_desc, CONFIG: gl.constexpr):
    STAGES: gl.constexpr = CONFIG.stages
    latent = allocate_boxes(k_desc, CHUNKS * STAGES, CHUNK)
    rest = allocate_boxes(rest_desc, STAGES, rest_desc.block_type.shape[-1])
    scales = ()
    if CONFIG.packed:
        scales = (allocate_boxes(scales_desc, STAGES, scales_desc.block_type.shape[-1]),)
    return Ring(latent, rest, scales, make_mbarriers(STAGES, 1))


@gluon.jit
def empty_barriers(CONFIG: gl.constexpr):
    """Of stages, each read by one warpgroup, or by a pair of them."""
    return NamedBarriers(FIRST_BARRIER, THREADS[CONFIG.paired])


@gluon.jit
def producer_warp(k_desc, rest_desc, scales_desc, ring, rows, keys, CONFIG: gl.constexpr):
    """The partition that loads keys."""
    STAGES: gl.constexpr = CONFIG.stages
    tile = tile_of(rows, keys, CONFIG)
    next_page = page_of(keys, tile, tile.lo, CONFIG)
    for n in range(tile.lo, tile.hi):
        coord = block_coord(keys, tile, n, next_page, CONFIG)
        next_page = page_of(keys, tile, n + 1, CONFIG)
        producer_acquire(empty_barriers(CONFIG), n - tile.lo, STAGES)
        load_stage(k_desc, rest_desc, scales_desc, ring, coord, stage_of(n - tile.lo, STAGES), CONFIG)


@gluon.jit
def load_stage(k_desc, rest_desc, scales_desc, ring, coord, stage, CONFIG: gl.constexpr):
    """Start the loads of a block."""
    STAGES: gl.constexpr = CONFIG.stages
    full = ring.full.index(stage)
    SCALES: gl.constexpr = scales_desc.block_type.nbytes if CONFIG.packed else 0
    mbarrier.expect(full, CHUNKS * k_desc.block_type.nbytes + rest_desc.block_type.nbytes + SCALES)
    for c in gl.static_range(CHUNKS):
        tma_load(k_desc, coord[:-1] + (c * CHUNK,), full, ring.latent.index(c * STAGES + stage))
    BEHIND: gl.constexpr = CHUNKS * CHUNK
    if CONFIG.packed:
        tma_load(scales_desc, coord[:-1] + (BEHIND,), full, ring.scales[0].index(stage))
        tma_load(rest_desc, coord[:-1] + (BEHIND + 4 * ROW_SCALES,), full, ring.rest.index(stage))
    else:
        tma_load(rest_desc, coord[:-1] + (BEHIND,), full, ring.rest.index(stage))


@gluon.jit
def load_queries(q, rows, keys, tile, CONFIG: gl.constexpr):
    """The queries of a tile, as products take them."""
    N: gl.constexpr = CONFIG.block_m
    PACKED: gl.constexpr = CONFIG.packed
    dtype: gl.constexpr = q.data.dtype.element_ty if PACKED else HALF
    base = q.data + tile.b.to(gl.int64) * q.stride_b * ALIGN
    of_rows: gl.constexpr = gl.SliceLayout(1, columns_layout(CHUNK))
    largest = gl.full([N], 2.0**LARGEST_EXPONENT, gl.float32, of_rows)  # which leaves queries as they are
    if not PACKED:
        largest = largest_of(query_columns(q, base, rows, tile, CHUNKS * CHUNK, REST, N))
        largest = gl.convert_layout(largest, of_rows)
        for c in gl.static_range(CHUNKS):
            largest = gl.maximum(largest, largest_of(query_columns(q, base, rows, tile, c * CHUNK, CHUNK, N)))
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, LARGEST_EXPONENT + 1)
    factor = ((254 + LARGEST_EXPONENT - exponent) << 23).to(gl.float32, bitcast=True)
    factors = gl.allocate_shared_memory(gl.float32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    factors.store(((exponent - LARGEST_EXPONENT) << 23).to(gl.float32, bitcast=True))
    latent = right_operand(dtype, N, CHUNK, CHUNKS)
    for c in gl.static_range(CHUNKS):
        x = query_columns(q, base, rows, tile, c * CHUNK, CHUNK, N) * gl.expand_dims(factor, 1)
        latent.index(c).store(in_words(x.to(dtype)))
    x = query_columns(q, base, rows, tile, CHUNKS * CHUNK, REST, N)
    x = (x * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, columns_layout(REST))), 1)).to(dtype)
    if not PACKED:  # the others are no bytes
        x = in_words(x)
    row = tile.first_row + gl.arange(0, N, of_rows)
    stops = gl.allocate_shared_memory(gl.int32, [N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    stops.store(visible_stop(rows, keys, tile, query_of(rows, row)))
    return TileQueries(latent, stored(x), factors, stops)


@gluon.constexpr_function
def columns_layout(D):
    return gl.BlockedLayout([1, D // 16], [2, 16], [4, 1], [1, 0])


@gluon.jit
def query_columns(q, base, rows, tile, FIRST: gl.constexpr, D: gl.constexpr, N: gl.constexpr):
    """Columns of a tile's queries `[N, D]`, in fp32; 0 behind the last row."""
    layout: gl.constexpr = columns_layout(D)
    row = tile.first_row + gl.arange(0, N, gl.SliceLayout(1, layout))
    feature = FIRST + gl.arange(0, D, gl.SliceLayout(0, layout))
    places = (head_of(rows, row).to(gl.int64) * q.stride_h + query_of(rows, row).to(gl.int64) * q.stride_m) * ALIGN
    exists = gl.expand_dims(row < rows.seqlen_q * rows.num_heads, 1)
    x = gl.load(base + (gl.expand_dims(places, 1) + gl.expand_dims(feature, 0)), mask=exists, other=0.0)
    return x.to(gl.float32)


@gluon.jit
def largest_of(x):
    """The largest finite number of each row, without its sign."""
    x = gl.abs(x)
    return gl.max(gl.where(x <= FLOAT_MAX, x, 0.0), 1)


@gluon.jit
def stored(x):
    """Queries in shared memory."""
    smem = right_operand(x.dtype, x.shape[0], x.shape[1])
    smem.index(0).store(x)
    return smem


@gluon.jit
def right_operand(dtype: gl.constexpr, N: gl.constexpr, D: gl.constexpr, COUNT: gl.constexpr = 1):
    """Shared memory for right operands of products, `[COUNT, N, D]`."""
    return gl.allocate_shared_memory(dtype, [COUNT, N, D], gl.NVMMASharedLayout.get_default_for([N, D], dtype))


@gluon.jit
def transposed(smem, n=0):
    """Right operand n as products take it, `[D, N]`. There are no registers for precomputed addresses of all."""
    return smem.index(opaque(n)).permute((1, 0))


@gluon.jit
def chunk_of(ring, c, stage, CONFIG: gl.constexpr):
    """A chunk of a block as a matrix `[64 keys, CHUNK]`. The compiler would load all chunks before the first product:
    there are no registers for that.
    """
    STAGES: gl.constexpr = CONFIG.stages
    return as_matrix(ring.latent.index(c * STAGES + opaque(stage)))


@gluon.jit
def rest_of(ring, stage, dtype: gl.constexpr, CONFIG: gl.constexpr):
    """The other features of a block, as the left operand of scores."""
    N: gl.constexpr = CONFIG.block_m
    rest = as_matrix(ring.rest.index(stage))
    if CONFIG.packed:
        shape: gl.constexpr = [MMA_M, REST]
        rest = reinterpret_smem(rest, gl.bfloat16, shape, gl.NVMMASharedLayout.get_default_for(shape, gl.bfloat16))
        if dtype != gl.bfloat16:
            rest = rest.load(operand_layout(N)).to(gl.float32).to(dtype)
        return rest
    else:
        return key_operand(rest, (), dtype, N)


@gluon.jit
def scales_of_rows(ring, stage, CONFIG: gl.constexpr):
    """The scales `[64, 4]` of a block's rows of 656 bytes; of other rows nothing."""
    scales = ()
    if CONFIG.packed:
        shape: gl.constexpr = [MMA_M, ROW_SCALES]
        of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scales = (reinterpret_smem(as_matrix(ring.scales[0].index(stage)), gl.float32, shape, of_rows),)
    return scales
