"""Main loop of the forward kernel in 8 bits: one block of keys for the 64 rows of a warpgroup.

Products of 8 bits keep some 14 bits of their sums. So each block's product with values is a sum of its own, which is
added to acc in float32, with the factor that rescales acc. It has chunks of the features, of which two are in flight.
Scores, p and sums of a step are those of the same block: products overlap with other warpgroups' softmax.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..forward.mainloop import (
    ForwardOutputs,
    TileUnits,
    block_keys,
    masked_scores,
    pair_block,
    release_q_early,
    zero_scores,
)
from ..shared.block_lists import BlockLists, block_at, load_bits, partial_of
from ..shared.column_masks import thread_view
from ..shared.compat import Pointer, Scalar
from ..shared.masking import MaskBounds
from ..shared.mma import MMA_M, gemm_nt
from ..shared.pages import PageTable
from ..shared.pipeline import consumer_release, consumer_wait, stage_chunks, stage_of
from ..shared.ptx import opaque
from ..shared.score_mod import Loaded
from ..shared.scores import ScoreParams
from ..shared.softmax import thread_row_sum
from ..shared.tile_scheduler import TileQueue
from . import softmax
from .producer import EightBitPipelines
from .rounding import mma_operand, rounded

SMALLEST_FACTOR, LARGEST_FACTOR = gl.constexpr(1e-12), gl.constexpr(1e12)
SUM_COLUMNS = gl.constexpr(8)


class Descales(NamedTuple):
    """Scales of heads in float32, `[B, Hkv]` or absent."""

    q_descale: Pointer
    k_descale: Pointer
    v_descale: Pointer
    q_descale_b: Scalar  # strides
    q_descale_h: Scalar
    k_descale_b: Scalar
    k_descale_h: Scalar
    v_descale_b: Scalar
    v_descale_h: Scalar


class EightBitContext(NamedTuple):
    """Arguments of the consumer warpgroups, the same for all tiles."""

    pipelines: EightBitPipelines
    quarters: gl.shared_memory_descriptor  # [SUM_COLUMNS, keys], 0.25 each
    outputs: ForwardOutputs
    queue: TileQueue
    bounds: MaskBounds
    diagonal: gl.tensor
    params: ScoreParams
    descales: Descales
    lists: BlockLists
    pages: PageTable


class EightBitState(NamedTuple):
    """State of a warpgroup's rows between two steps."""

    acc: tuple[gl.tensor, ...]
    l: gl.tensor  # [M, 4], sum of rounded p  # noqa: E741
    row_base: gl.tensor
    total: gl.tensor  # [M, 4], sum of p as it was before, of lse


@gluon.jit
def descale(data, stride_b, stride_h, b, head):
    """The scale of a head, 1 if there is none."""
    if data is None:
        return 1.0
    else:
        return gl.load(data + b.to(gl.int64) * stride_b + head * stride_h)


@gluon.jit
def tile_units(params, descales, tile):
    """Units of a tile's scores. The softmax takes the scales if their product is positive and far from overflow, also
    times the factor of scores, and no term is added to scores.
    """
    b = gl.minimum(tile.b, params.batch - 1)
    factor = descale(descales.q_descale, descales.q_descale_b, descales.q_descale_h, b, tile.head_k)
    factor = factor * descale(descales.k_descale, descales.k_descale_b, descales.k_descale_h, b, tile.head_k)
    if descales.q_descale is None and descales.k_descale is None:
        return TileUnits(params.factor, params.factor, False)
    elif params.multiplier is None:
        in_scores = ~((factor > SMALLEST_FACTOR) & (factor < LARGEST_FACTOR)) | (params.factor * factor == 0)
        return TileUnits(params.factor * gl.where(in_scores, 1.0, factor), factor, in_scores)
    else:
        return TileUnits(params.factor, factor, True)


@gluon.jit
def value_descale(params, descales, tile):
    b = gl.minimum(tile.b, params.batch - 1)
    return descale(descales.v_descale, descales.v_descale_b, descales.v_descale_h, b, tile.head_k)


@gluon.jit
def initial_state(tile, params, outputs, CONFIG: gl.constexpr):
    """State before the first block of a tile."""
    with_sink = tile.b < params.batch
    if outputs.num_heads is not None:  # the first split alone
        with_sink = tile.lse_head < params.batch * outputs.num_heads
    CHUNKS: gl.constexpr = CONFIG.value_chunks
    acc = ()
    for _ in gl.static_range(CHUNKS):
        acc = acc + (zero_product(CONFIG.value_columns),)
    row_base, l = softmax.initial_state(  # noqa: E741
        zero_scores(CONFIG.block_n), params.sinks, tile.head, with_sink
    )
    return EightBitState(acc, l, row_base, l)


@gluon.jit
def zero_product(WIDTH: gl.constexpr):
    """Zeros `[MMA_M, WIDTH]` in the layout of a product of 8 bits."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    return gl.zeros([MMA_M, WIDTH], gl.float32, layout)


@gluon.jit
def value_product(context, p, count, c: gl.constexpr, CONFIG: gl.constexpr):
    """Issue `p @ v` of a block for chunk c of the features."""
    WIDTH: gl.constexpr = CONFIG.value_columns
    v = context.pipelines.v_transposed.data[0].index(stage_of(count, CONFIG.transposed_stages))
    if CONFIG.value_chunks > 1:
        v = v.slice(c * WIDTH, WIDTH, dim=0)
    zeros = zero_product(WIDTH)
    p = mma_operand(p, zeros)
    return warpgroup_mma(p, v.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def scores_of_block(context, s, wg_tile, block, entry, bits, loaded, units, CONFIG: gl.constexpr):
    """Final scores `[MMA_M, BLOCK_N]` of a complete product of q and a block of keys."""
    params, descales = context.params, context.descales
    s = gl.convert_layout(s, zero_scores(CONFIG.block_n).type.layout, assert_trivial=True)
    if descales.q_descale is not None or descales.k_descale is not None:
        if params.multiplier is not None:  # noqa: SIM114 - a compile-time branch
            s = s * units.factor
        elif units.in_scores:
            s = s * units.factor
    return masked_scores(s, wg_tile, block, entry, bits, context, loaded, units, CONFIG)


@gluon.jit
def issue_scores(context, q_i, count, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Wait for a block of keys, and issue its product with q."""
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    STAGES: gl.constexpr = CONFIG.stages
    consumer_wait(context.pipelines.k, count, STAGES)
    if CONFIG.q_stages == 1:
        q_i = stage_chunks(context.pipelines.q, opaque(warpgroup), CONFIG.num_warpgroups, HEAD_DIM)
    return gemm_nt(q_i, stage_chunks(context.pipelines.k, count, STAGES, HEAD_DIM), zero_product(CONFIG.block_n))


@gluon.jit
def release_keys(context, count, tile_count, is_last, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Release a block of keys, and q with the last one of a tile."""
    consumer_release(context.pipelines.k.empty, count, CONFIG.stages)
    release_q_early(context.pipelines.q_empty, tile_count, warpgroup, is_last, CONFIG)


@gluon.jit
def mainloop_step(
    state, context, q_i, loaded, units, count, tile_count, wg_tile, n, entry,
    warpgroup: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Step number `count`: scores, p and sums of the tile's block at position n, with an entry where tiles have lists.
    `loaded` is what a mask's function takes of the tile.
    """
    v_transposed = context.pipelines.v_transposed
    tile, lists = wg_tile.tile, context.lists
    block = block_at(lists, n, entry)
    s = issue_scores(context, q_i, count, warpgroup, CONFIG)
    of_keys, partial = block_keys(context, tile, block, CONFIG), partial_of(lists, entry)
    bits = load_bits(lists, entry, tile.token_k, n, warpgroup * MMA_M, zero_scores(CONFIG.block_n), CONFIG.block_m)
    s = warpgroup_mma_wait(0, deps=(s,))
    release_keys(context, count, tile_count, n == wg_tile.tile.lo, warpgroup, CONFIG)
    pairs = pair_block(context.params, wg_tile, block, (), CONFIG)
    loaded = Loaded(loaded.head, loaded.rows, of_keys, partial, pairs)
    t = scores_of_block(context, s, wg_tile, block, entry, bits, loaded, units, CONFIG)
    row_base, alpha, p = softmax.update(state.row_base, state.l, t, units.scale_log2, CONFIG.speculative_exps)
    total = in_place(state.total * alpha + thread_row_sum(p))
    consumer_wait(v_transposed, count, CONFIG.transposed_stages)
    acc, l = add_products(state, alpha, rounded(p), context, count, CONFIG)  # noqa: E741
    consumer_release(v_transposed.empty, count, CONFIG.transposed_stages)
    return EightBitState(acc, l, row_base, total)


@gluon.jit
def in_place(x):
    """x, computed where it stands: if its sums came after the products, p would take registers until then."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1; // in_place", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def add_products(state, alpha, p, context, count, CONFIG: gl.constexpr):
    """acc and l with a block's p in words. Two products are in flight; that of the sum of p is the last one."""
    CHUNKS: gl.constexpr = CONFIG.value_chunks
    product = value_product(context, p, count, 0, CONFIG)
    acc = ()
    for c in gl.static_range(CHUNKS):
        if c + 1 < CHUNKS:  # noqa: SIM108 - a compile-time branch
            following = value_product(context, p, count, c + 1, CONFIG)
        else:
            following = sum_product(context, p)
        product = warpgroup_mma_wait(1, deps=(product,))
        acc = acc + (softmax.scaled_sum(state.acc[c], alpha, product),)
        product = following
    sums = column_sums(warpgroup_mma_wait(0, deps=(product,)))
    return acc, state.l * alpha + gl.convert_layout(sums, state.l.type.layout, assert_trivial=True)


@gluon.jit
def sum_product(context, p):
    """Issue the sum of p of a block: a quarter in each of 8 equal columns."""
    zeros = zero_product(SUM_COLUMNS)
    p = mma_operand(p, zeros)
    return warpgroup_mma(p, context.quarters.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def column_sums(product):
    """`[M, 4]` of the product of `sum_product`: a quarter for each thread of a row."""
    return gl.max(gl.max(thread_view(product), 3), 1)
