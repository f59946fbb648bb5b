"""Main loop of the forward kernel: one block of keys for the 64 rows of a warpgroup.

The product of q with a block of keys and the product of the previous block's p with its values are in flight together;
the softmax overlaps another warpgroup's products. acc is therefore one block behind the scores, across tile boundaries
too: a tile's first step completes acc of the previous tile.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..shared import score_mod, scores, softmax
from ..shared.bias_tiles import read_bias_tile
from ..shared.block_lists import BlockLists, block_at, is_cut, load_bits, partial_of, with_bits
from ..shared.column_masks import where_bits
from ..shared.distances import columns
from ..shared.dropout import Dropout, kept_pairs, where_kept
from ..shared.masking import MaskBounds, n_block_range, visible_keys
from ..shared.mma import MMA_M, gemm_nt, gemm_rs, gemm_wait_pair, zero_accumulators
from ..shared.pages import PageTable, keys_in_pages
from ..shared.pairs import PairBlock, hide
from ..shared.pipeline import consumer_release, consumer_wait, stage_chunks
from ..shared.ptx import opaque
from ..shared.score_mod import KeyRun, Loaded
from ..shared.scores import ScoreParams
from ..shared.softmax import INFINITY
from ..shared.tile_scheduler import TileQueue, WorkTile
from .key_order import block_of_step, first_block
from .producer import ForwardPipelines, q_stage

SMALLEST_FACTOR = gl.constexpr(1e-12)
LARGEST_FACTOR = gl.constexpr(1e12)


class ForwardOutputs(NamedTuple):
    """Results and the staging buffers of their TMA stores."""

    out: gl.tensor  # descriptor
    smem: gl.shared_memory_descriptor  # [NUM_WARPGROUPS, *rows, epilogue_columns]
    lse: gl.tensor  # pointer, [B, H, Sq] or [H, T]
    residual: gl.tensor | None  # of lse, pointer
    stride_lse: gl.tensor  # between heads
    num_heads: gl.tensor | None  # with split keys


class ForwardContext(NamedTuple):
    """Arguments of the consumer warpgroups, the same for all tiles."""

    pipelines: ForwardPipelines
    outputs: ForwardOutputs
    queue: TileQueue
    bounds: MaskBounds
    diagonal: gl.tensor
    params: ScoreParams
    dropout: Dropout
    lists: BlockLists
    pages: PageTable


class WarpgroupTile(NamedTuple):
    """64 rows of a tile, and the blocks of keys that need no mask for them."""

    tile: WorkTile
    first_row: gl.tensor
    full_lo: gl.tensor
    full_hi: gl.tensor
    shift: gl.tensor  # the diagonal is `key = row + shift`
    first_block: gl.tensor  # of keys, in the order of `key_order`


class TileUnits(NamedTuple):
    """Units of a tile's scores: the kernel's, but for a score_mod that multiplies scores by a factor of the head."""

    scale_log2: gl.tensor  # converts scores to base-2 logarithms
    factor: gl.tensor  # of scores, where scale_log2 cannot include it
    in_scores: gl.tensor  # whether scores have the factor


class SoftmaxState(NamedTuple):
    """State of a warpgroup's rows between two steps."""

    acc: tuple[gl.tensor, ...]  # p @ v without the last block, one for each chunk
    p: gl.tensor  # of the last block
    row_max: gl.tensor
    l: gl.tensor  # sum of p over all blocks  # noqa: E741


@gluon.jit
def warpgroup_tile(tile, warpgroup: gl.constexpr, context, CONFIG: gl.constexpr):
    """A warpgroup's rows of a tile."""
    BLOCK_N: gl.constexpr = CONFIG.block_n
    first_row = tile.first_row + warpgroup * MMA_M
    shift = tile.seqlen_k - tile.seqlen_q + context.diagonal
    blocks = n_block_range(context.bounds, first_row, first_row + (MMA_M - 1), shift, tile.seqlen_k, BLOCK_N)
    full_hi = blocks.full_hi
    if context.pages.data is not None:
        full_hi = gl.where(tile.token_k == 0, full_hi, 0)  # where pages do not exist, all blocks need a mask
    first = first_block(tile, context.params.inputs, CONFIG)
    return WarpgroupTile(tile, first_row, blocks.full_lo, full_hi, shift, first)


@gluon.jit
def zero_scores(BLOCK_N: gl.constexpr):
    """Zeros `[MMA_M, BLOCK_N]` in the layout of scores."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return gl.zeros([MMA_M, BLOCK_N], gl.float32, layout)


@gluon.jit
def initial_state(wg_tile, params, outputs, dtype: gl.constexpr, CONFIG: gl.constexpr):
    """State before the first step of a program. The accumulator finished there is garbage and is discarded."""
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    acc = zero_accumulators(HEAD_DIM_V)
    p = mma_operand(zero_scores(CONFIG.block_n), acc, dtype)
    return next_tile_state(acc, p, wg_tile, params, outputs, CONFIG)


@gluon.jit
def next_tile_state(acc, p, wg_tile, params, outputs, CONFIG: gl.constexpr):
    """State before the first step of a tile: a new row_max and l; acc and p are still the previous tile's."""
    tile = wg_tile.tile
    with_sink = tile.b < params.batch
    if outputs.num_heads is not None:  # the first split alone
        with_sink = tile.lse_head < params.batch * outputs.num_heads
    row_max, l = softmax.initial_state(  # noqa: E741
        zero_scores(CONFIG.block_n), params.sinks, tile.head, with_sink, CONFIG.natural
    )
    return SoftmaxState(acc, p, row_max, l)


@gluon.jit
def mma_operand(p, acc, dtype: gl.constexpr):
    """p as the left operand of its product with values, in the registers that hold it."""
    layout: gl.constexpr = acc[0].type.layout
    return gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def mainloop_step(
    state, accumulate, context, stream, q_i, loaded, units, count, tile_count, wg_tile, n, entry,
    warpgroup: gl.constexpr, CONFIG: gl.constexpr,
):  # fmt: skip
    """Step number `count`: scores and p of one block of keys, and the product of the previous block's p and values.
    It is step `n` of its tile (`key_order`), with an entry where tiles have lists.

    Without `accumulate`, acc starts anew with this product. `loaded` is what the scores take of the tile.
    """
    HEAD_DIM: gl.constexpr = CONFIG.head_dim
    HEAD_DIM_V: gl.constexpr = CONFIG.head_dim_v
    STAGES: gl.constexpr = CONFIG.stages
    PV_GEMMS: gl.constexpr = len(HEAD_DIM_V.chunks)
    pipelines, tile = context.pipelines, wg_tile.tile
    k, v = pipelines.k, pipelines.v
    block = block_at(context.lists, block_of_step(n, wg_tile.first_block, tile, CONFIG), entry)
    consumer_wait(k, count, STAGES)
    consumer_wait(v, count, STAGES)
    if CONFIG.q_stages == 1:
        # Wide heads leave no registers for precomputed addresses.
        q_i = stage_chunks(pipelines.q, opaque(warpgroup), CONFIG.num_warpgroups, HEAD_DIM)
    s = gemm_nt(q_i, stage_chunks(k, count, STAGES, HEAD_DIM), zero_scores(CONFIG.block_n))
    acc = gemm_rs(state.acc, state.p, stage_chunks(v, count, STAGES, HEAD_DIM_V), accumulate)
    of_keys, partial = block_keys(context, tile, block, CONFIG), partial_of(context.lists, entry)
    first_line = warpgroup * MMA_M
    bits = load_bits(context.lists, entry, tile.token_k, n, first_line, zero_scores(CONFIG.block_n), CONFIG.block_m)
    kept = kept_pairs(
        context.dropout, stream, tile.b, tile.head, wg_tile.first_row, block * CONFIG.block_n,
        zero_scores(CONFIG.block_n), False,
    )  # fmt: skip
    s = warpgroup_mma_wait(PV_GEMMS, deps=(s,))
    bias = tile_bias(pipelines.bias, count, warpgroup, CONFIG)
    pairs = pair_block(context.params, wg_tile, block, bias, CONFIG)
    loaded = Loaded(loaded.head, loaded.rows, of_keys, partial, pairs)
    consumer_release(k.empty, count, STAGES)
    release_q_early(pipelines.q_empty, tile_count, warpgroup, n == tile.lo, CONFIG)
    t = masked_scores(s, wg_tile, block, entry, bits, context, loaded, units, CONFIG)
    row_max, alpha, changed, p = softmax.update(
        state.row_max, t, units.scale_log2, CONFIG.speculative_exps, CONFIG.natural
    )
    l = state.l * alpha + softmax.thread_row_sum(p)  # noqa: E741
    p = where_kept(kept, p, False)
    acc, p, l = gemm_wait_pair(acc, p, l)  # noqa: E741
    consumer_release(v.empty, count, STAGES)
    p = mma_operand(p, acc, v.data[0].dtype)
    changed = gl.where(n == tile.hi - 1, 0, changed)  # in a first step, acc is the previous tile's
    return SoftmaxState(softmax.rescale(acc, alpha, changed), p, row_max, l)


@gluon.jit
def skip_steps(pipelines, tile_count, count, steps, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Release the stages of a tile's last `steps` steps, from number `count` on, for a warpgroup without rows."""
    k, v = pipelines.k, pipelines.v
    for step in range(steps):
        consumer_wait(k, count + step, CONFIG.stages)
        consumer_wait(v, count + step, CONFIG.stages)
        consumer_release(k.empty, count + step, CONFIG.stages)
        consumer_release(v.empty, count + step, CONFIG.stages)
    release_q_early(pipelines.q_empty, tile_count, warpgroup, steps > 0, CONFIG)


@gluon.jit
def masked_scores(s, wg_tile, block, entry, bits, context, loaded, units, CONFIG: gl.constexpr):
    """Final scores `[MMA_M, BLOCK_N]` of a block of keys, in the tile's units. `bits` are those of `load_bits`."""
    BLOCK_N: gl.constexpr = s.shape[1]
    tile = wg_tile.tile
    first_key = block * BLOCK_N
    rows, keys = score_rows(wg_tile, BLOCK_N), score_keys(block, BLOCK_N)
    if CONFIG.head_factor:
        t, _ = scores.unmodified_score(s, context.params, tile.b, tile.head, wg_tile.shift, rows, keys, loaded, CONFIG)
        if units.in_scores:
            t = t * units.factor
        t = hide(t, context.params.pairs, loaded.pairs, loaded.partial, CONFIG.pair_align)
    else:
        distance = wg_tile.first_row - first_key
        t = scores.forward(s, context.params, tile.b, tile.head, wg_tile.shift, rows, keys, distance, loaded, CONFIG).t
    if is_cut((block >= wg_tile.full_hi) | (block < wg_tile.full_lo), context.lists, entry):
        visible = visible_keys(t, context.bounds, wg_tile.first_row, first_key, wg_tile.shift, tile.seqlen_k)
        visible = with_bits(visible, bits)
        if context.pages.data is not None:  # noqa: SIM102 - a compile-time branch
            if tile.token_k != 0:
                visible = visible & keys_in_pages(context.pages, tile, block, CONFIG)
        t = where_bits(visible, t, -INFINITY)
    return t


@gluon.jit
def score_rows(wg_tile, BLOCK_N: gl.constexpr):
    """Rows `[MMA_M, 1]` of a tile's scores."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return gl.expand_dims(wg_tile.first_row + gl.arange(0, MMA_M, gl.SliceLayout(1, layout)), 1)


@gluon.jit
def score_keys(block, BLOCK_N: gl.constexpr):
    """Keys `[1, BLOCK_N]` of a block's scores."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    return columns(block * BLOCK_N, BLOCK_N, layout)


@gluon.jit
def load_tile(params, wg_tile, CONFIG: gl.constexpr):
    """Load what scores need of a tile's head and rows."""
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    tile = wg_tile.tile
    rows = score_rows(wg_tile, CONFIG.block_n)
    return Loaded(
        score_mod.load_head(params, tile.b, tile.head, SCORE_MOD),
        score_mod.load_rows(params, tile.b, tile.head, rows, SCORE_MOD),
        (),
        (),
        (),
    )


@gluon.jit
def tile_bias(tiles, count, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """The bias of a step's scores, in a tuple; an empty one where it has no tiles."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CONFIG.block_n, 16])
    if len(tiles) > 0:
        return (read_bias_tile(tiles[0], count, True, warpgroup, False, layout, CONFIG.num_warpgroups, CONFIG),)
    else:
        return ()


@gluon.jit
def pair_block(params, wg_tile, block, bias, CONFIG: gl.constexpr):
    """A warpgroup's block of scores, for bias and mask."""
    BLOCK_N: gl.constexpr = CONFIG.block_n
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    # In 64 bits, the addresses of a row's keys are one register and constants.
    keys = columns((block * BLOCK_N).to(gl.int64), BLOCK_N, layout)
    tile = wg_tile.tile
    sequence = gl.minimum(tile.b, params.batch - 1)
    rows, stop = score_rows(wg_tile, BLOCK_N), (block + 1) * BLOCK_N
    return PairBlock(sequence, tile.head, rows, keys, stop, tile.seqlen_k, bias)


@gluon.jit
def block_keys(context, tile, block, CONFIG: gl.constexpr):
    """Elements of a block's keys for a score_mod; with lists and a mask function alone the keys themselves, whose
    elements are loaded in partly visible blocks.
    """
    BLOCK_N: gl.constexpr = CONFIG.block_n
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    params = context.params
    keys = score_keys(block, BLOCK_N)
    if SCORE_MOD is None:
        return ()
    else:
        first = block * BLOCK_N + params.inputs.j0
        run = KeyRun(columns(first.to(gl.int64), BLOCK_N, layout), first + BLOCK_N)
        if context.lists.data is not None and SCORE_MOD.mask_only:
            return run
        else:
            return score_mod.load_keys(params, tile.b, tile.head, keys, run, SCORE_MOD)


@gluon.jit
def tile_units(params, wg_tile, loaded, CONFIG: gl.constexpr):
    """Units of a tile's scores. The softmax takes a head's factor if it is positive and far from overflow, but not of
    natural scores.
    """
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    if CONFIG.head_factor:
        factor = score_mod.head_factor(params, wg_tile.tile.b, wg_tile.tile.head, loaded, SCORE_MOD)
        in_scores = ~((factor > SMALLEST_FACTOR) & (factor < LARGEST_FACTOR))
        if CONFIG.natural:
            return TileUnits(params.factor, factor, True)
        else:
            return TileUnits(params.factor * gl.where(in_scores, 1.0, factor), factor, in_scores)
    else:
        return TileUnits(params.factor, params.factor, False)


@gluon.jit
def release_q_early(q_empty, tile_count, warpgroup, last, CONFIG: gl.constexpr):
    """With a single stage for q, release it with the tile's last scores: the next q loads during the softmax."""
    if CONFIG.q_stages == 1:
        mbarrier.arrive(q_empty.index(q_stage(tile_count, warpgroup, CONFIG)), count=1, pred=last)
