"""What warpgroups do with a block of latent rows of 8 bits: scores, probabilities, sums, and the finished tile.

Products are transposed (`operands`): scores are `[64 keys, N rows]`, sums `[128 features, N]` for each chunk of values.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..latent.forward import LatentUnits
from ..latent.rows import LatentKeys, LatentRows, head_of, query_of, visible_stop
from ..shared.compat import Pointer, Scalar, thread_barrier
from ..shared.epilogue import ALIGN, OutputTensor
from ..shared.mma import MMA_M, gemm_wait
from ..shared.pages import column_and_row
from ..shared.ptx import opaque
from ..shared.softmax import FLOAT_MAX, INFINITY, LN2, log2
from .memory import Ring, TileQueries, chunk_of, rest_of, transposed
from .operands import (
    CHUNK,
    CHUNKS,
    KEY_SCALES,
    VALUE_SCALES,
    features_of_rows,
    key_operand,
    product_layout,
    scale_of,
    scale_of_chunk,
    scales_of_keys,
    value_operand,
)

# The largest probability is 2 ** 15, so that float16 holds those down to 2 ** -39 of it.
HEADROOM = gl.constexpr(15.0)


class ScaleTensor(NamedTuple):
    """Scales of keys or values, one for each sequence or for each key; `None` without them."""

    data: Pointer
    stride_b: Scalar
    stride_p: Scalar
    stride_n: Scalar


class Sums(NamedTuple):
    """What warpgroups exchange."""

    stats: gl.shared_memory_descriptor  # [2 * warpgroups, N] fp32: row_max and l of each
    read: gl.shared_memory_descriptor  # [1, 1] mbarrier: all blocks are read, and their memory is free
    there: gl.shared_memory_descriptor  # [1, 1] mbarrier: all sums are there


class BytesContext(NamedTuple):
    """What warpgroups have in common."""

    queries: TileQueries
    ring: Ring
    p: tuple[gl.shared_memory_descriptor, ...]  # for each warpgroup, [1, N, 64]
    sums: Sums
    k_descale: ScaleTensor
    v_descale: ScaleTensor
    out: OutputTensor
    lse: gl.tensor
    rows: LatentRows
    keys: LatentKeys
    units: LatentUnits


class RowState(NamedTuple):
    """What a tile's rows have in common."""

    factor: gl.tensor  # of scores
    full_stop: gl.tensor  # the key before which all rows' keys end


@gluon.jit
def row_state(context, tile, CONFIG: gl.constexpr):
    K_SCALES: gl.constexpr = CONFIG.k_scales
    factor = context.units.factor
    if context.units.multiplier is not None:
        factor = factor * context.units.multiplier
    factor = factor * scale_of_head(context.k_descale, tile, K_SCALES)
    return RowState(factor, visible_stop(context.rows, context.keys, tile, 0))


@gluon.jit
def no_sums(N: gl.constexpr):
    """`sums_of_threads` of no keys."""
    return sums_of_threads(gl.zeros([MMA_M, N], gl.float32, product_layout(N)))


@gluon.jit
def sums_of_threads(p):
    """`[64, N] -> [4, 8, N]`, the sums of each thread's keys."""
    N: gl.constexpr = p.shape[1]
    return gl.sum(gl.reshape(p, [4, 2, 8, N]), 1)


@gluon.jit
def rescaled(l, alpha):  # noqa: E741
    """Sums `[4, 8, N]` times `alpha [N]`."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, l.type.layout))
    return l * gl.expand_dims(gl.expand_dims(gl.convert_layout(alpha, layout, assert_trivial=True), 0), 0)


@gluon.jit
def visible_scores(context, state, tile, n, page, scales, stage, CONFIG: gl.constexpr):
    """Scores of a block as base-2 exponents, -inf of pairs that are not visible."""
    N: gl.constexpr = CONFIG.block_m
    K_SCALES: gl.constexpr = CONFIG.k_scales
    layout: gl.constexpr = product_layout(N)
    k_scale = scale_of_keys(context.k_descale, tile, n, page, K_SCALES, layout, context, CONFIG)
    of_columns: gl.constexpr = gl.SliceLayout(0, layout)
    t = scores(context, scales, stage, CONFIG)
    t = t * gl.expand_dims(context.queries.factors.load(of_columns) * state.factor, 0)
    if K_SCALES == "key":
        t = t * gl.expand_dims(k_scale, 1)
    if (page < 0) | ((n + 1) * MMA_M > state.full_stop):
        key = n * MMA_M + gl.arange(0, MMA_M, gl.SliceLayout(1, layout))
        stop = gl.where(page < 0, 0, context.queries.stops.load(of_columns))
        t = gl.where(gl.expand_dims(key, 1) < gl.expand_dims(stop, 0), t, -INFINITY)
    return t


@gluon.jit
def largest_of_scores(t):
    """What row_max has to be at least, `[N]`."""
    return gl.max(t, 0) - HEADROOM


@gluon.jit
def probabilities(t, row_max):
    return gl.exp2(t - gl.expand_dims(row_max, 0))


@gluon.jit
def put_probabilities(context, p, tile, n, page, W: gl.constexpr, CONFIG: gl.constexpr):
    """Put probabilities `[64, N]`, times the scales of values, where products read them."""
    V_SCALES: gl.constexpr = CONFIG.v_scales
    if V_SCALES == "key":
        v_scale = scale_of_keys(context.v_descale, tile, n, page, V_SCALES, product_layout(p.shape[1]), context, CONFIG)
        p = p * gl.expand_dims(v_scale, 1)
    place = context.p[W].index(0)
    place.permute((1, 0)).store(p.to(place.dtype))
    fence_async_shared()


@gluon.jit
def scale_of_head(scales, tile, KIND: gl.constexpr):
    """The scale of all keys of a sequence, or 1."""
    if KIND == "head":
        return gl.load(scales.data + tile.b.to(gl.int64) * scales.stride_b)
    else:
        return 1.0


@gluon.jit
def scale_of_keys(
    scales, tile, n, page, KIND: gl.constexpr, layout: gl.constexpr, context, CONFIG: gl.constexpr
):  # fmt: skip
    """The scales `[64]` of a block of keys, where each has its own."""
    if KIND == "key":
        key = n * MMA_M + gl.arange(0, MMA_M, gl.SliceLayout(1, layout))
        _, row = column_and_row(context.keys.page_table, key, CONFIG)
        of_page = (
            scales.data + tile.b.to(gl.int64) * scales.stride_b + gl.maximum(page, 0).to(gl.int64) * scales.stride_p
        )
        return gl.load(
            of_page + row.to(gl.int64) * scales.stride_n, mask=(key < tile.seqlen_k) & (page >= 0), other=0.0
        )
    else:
        return 1.0


@gluon.constexpr_function
def is_rolled(config, of_keys):
    """Whether scores are a loop over chunks: beyond 32 KiB, the code of both warpgroups is fetched too slowly. That of
    16 rows is smaller, if floating-point numbers of 8 bits have one scale for all keys.
    """
    return config.block_m > 16 or config.packed or of_keys == gl.int8 or "key" in (config.k_scales, config.v_scales)


@gluon.jit
def scores(context, scales, stage, CONFIG: gl.constexpr):
    """Products of a block's keys and all queries, `[64, N]`."""
    N: gl.constexpr = CONFIG.block_m
    queries, ring = context.queries, context.ring
    dtype: gl.constexpr = queries.rest.dtype
    s = gl.zeros([MMA_M, N], gl.float32, product_layout(N))
    rest = rest_of(ring, stage, dtype, CONFIG)
    s = warpgroup_mma(rest, transposed(queries.rest), s, use_acc=False, is_async=True)
    ROLLED: gl.constexpr = is_rolled(CONFIG, ring.latent.dtype)
    if ROLLED:
        s = warpgroup_mma_wait(0, deps=(s,))
        of_keys = scales_of_keys(scales)
        for c in range(opaque(CHUNKS)):
            x = key_operand(chunk_of(ring, c, stage, CONFIG), scale_of_chunk(of_keys, c), dtype, N)
            s = warpgroup_mma(x, transposed(queries.latent, c), s, use_acc=True, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
    else:
        for c in gl.static_range(CHUNKS):
            x = key_operand(chunk_of(ring, c, stage, CONFIG), scale_of(scales, c, KEY_SCALES), dtype, N)
            s = warpgroup_mma(x, transposed(queries.latent, c), s, use_acc=True, is_async=True)
            s = warpgroup_mma_wait(CONFIG.in_flight, deps=(s,))
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def add_values(ring, p, acc, scales, stage, FIRST: gl.constexpr, CONFIG: gl.constexpr):
    """Add the products of probabilities and a block's values, of the chunks from FIRST on."""
    N: gl.constexpr = CONFIG.block_m
    result = ()
    for c in gl.static_range(len(acc)):
        x = value_operand(
            chunk_of(ring, FIRST + c, stage, CONFIG), scale_of(scales, FIRST + c, VALUE_SCALES), p.dtype, N
        )
        result = result + (warpgroup_mma(x, transposed(p), acc[c], use_acc=True, is_async=True),)
        result = gemm_wait(result, CONFIG.in_flight)
        if CONFIG.in_turn:
            thread_barrier()
    return gemm_wait(result)


@gluon.jit
def rescale(acc, alpha):
    """Sums `[128, N]`, one for each chunk, times `alpha [N]`."""
    result = ()
    for c in gl.static_range(len(acc)):
        result = result + (acc[c] * gl.expand_dims(alpha, 0),)
    return result


@gluon.jit
def store(context, tile, acc, row_max, l, FIRST: gl.constexpr, CONFIG: gl.constexpr):  # noqa: E741
    """Store the chunks from FIRST on of finished rows, and their lse with the first one; 0 and -inf without keys."""
    N: gl.constexpr = CONFIG.block_m
    V_SCALES: gl.constexpr = CONFIG.v_scales
    rows, out = context.rows, context.out
    row_max = gl.where(row_max == FLOAT_MAX, INFINITY, row_max)
    lse = gl.where(l == 0, -INFINITY, (row_max + log2(l)) * LN2)
    weight = gl.where(l == INFINITY, float("nan"), 1.0 / gl.where(l == 0, 1.0, l))  # inf / inf
    weight = gl.where(l == 0, 1.0, weight * scale_of_head(context.v_descale, tile, V_SCALES))
    b = (tile.split * context.keys.batch + tile.b).to(gl.int64)
    row = tile.first_row + gl.arange(0, N, row_max.type.layout)
    place = (b * rows.num_heads + head_of(rows, row)) * rows.seqlen_q + query_of(rows, row)
    if FIRST == 0:
        gl.store(context.lse + place, lse, mask=row < rows.seqlen_q * rows.num_heads)
    for c in gl.static_range(len(acc)):
        x = features_of_rows(acc[c] * gl.expand_dims(weight, 0)).to(out.data.dtype.element_ty)
        store_chunk(out, rows, x, b, tile.first_row, FIRST + c)


@gluon.jit
def store_chunk(out, rows, x, b, first_row, c: gl.constexpr):
    """Store the features of a chunk, `[CHUNK, N]`."""
    N: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    row = first_row + gl.arange(0, N, gl.SliceLayout(0, layout))
    feature = c * CHUNK + gl.arange(0, CHUNK, gl.SliceLayout(1, layout))
    places = head_of(rows, row).to(gl.int64) * out.stride_h + query_of(rows, row).to(gl.int64) * out.stride_m
    pointers = out.data + b * out.stride_b * ALIGN + gl.expand_dims(places * ALIGN, 0) + gl.expand_dims(feature, 1)
    gl.store(pointers, x, mask=gl.expand_dims(row < rows.seqlen_q * rows.num_heads, 0))
