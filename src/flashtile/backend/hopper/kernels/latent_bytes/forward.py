"""Forward kernel of latent rows of 8 bits, where memory binds.

Up to 16 rows of queries, warpgroups take blocks of keys in turn (`warpgroup`), each with a softmax and sums of its own,
so that one waits for its products while others convert; in the end they add up their sums. Sums of more rows have no
room in one warpgroup: two share each pair of blocks (`paired`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..latent.forward import LatentUnits
from ..latent.rows import LatentKeys, LatentRows, page_of
from ..shared.compat import Pointer, kernel, reinterpret_smem, thread_barrier
from ..shared.epilogue import OutputTensor
from ..shared.mma import MMA_M
from ..shared.partitions import numbered, run_partitions
from ..shared.pipeline import FIRST_BARRIER, LAST_BARRIER, consumer_release, consumer_wait, make_mbarriers, stage_of
from ..shared.softmax import FLOAT_MAX
from .blocks import (
    BytesContext,
    ScaleTensor,
    Sums,
    add_values,
    largest_of_scores,
    no_sums,
    probabilities,
    put_probabilities,
    rescale,
    rescaled,
    row_state,
    store,
    sums_of_threads,
    visible_scores,
)
from .memory import (
    Queries,
    empty_barriers,
    load_queries,
    make_ring,
    producer_warp,
    right_operand,
    scales_of_rows,
    tile_of,
)
from .operands import CHUNK, CHUNKS, product_layout
from .paired import paired_warpgroup


@kernel
def latent_bytes_kernel(
    q: Queries, k_desc: Pointer, rest_desc: Pointer, scales_desc: Pointer, k_descale: ScaleTensor,
    v_descale: ScaleTensor, out: OutputTensor, lse: Pointer, rows: LatentRows, keys: LatentKeys, units: LatentUnits,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Boxes of pages of bytes: `[1, 1, 1, 64, CHUNK]`, and those of the other features and of scales.

    With `num_splits`, out and lse are those of each split of the keys, `[num_splits * B, H, Sq, Dv]` in fp32 and
    `[num_splits * B, H, Sq]`.
    """
    gl.static_assert(FIRST_BARRIER + CONFIG.stages <= LAST_BARRIER)
    gl.static_assert(CONFIG.paired or CONFIG.stages % CONFIG.num_warpgroups == 0)  # each wait is for the next phase
    N: gl.constexpr = CONFIG.block_m
    WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    VALUES: gl.constexpr = values_dtype(CONFIG, q.data.dtype.element_ty)
    ring = make_ring(k_desc, rest_desc, scales_desc, CONFIG)
    queries = load_queries(q, rows, keys, tile_of(rows, keys, CONFIG), CONFIG)
    stats = gl.allocate_shared_memory(gl.float32, [3 * WARPGROUPS, N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sums = Sums(stats, make_mbarriers(1, WARPGROUPS), make_mbarriers(1, WARPGROUPS))
    p = ()
    for _ in gl.static_range(WARPGROUPS):
        p = p + (right_operand(VALUES, N, MMA_M),)
    fence_async_shared()
    context = BytesContext(queries, ring, p, sums, k_descale, v_descale, out, lse, rows, keys, units)
    run_partitions(
        CONFIG,
        numbered(paired_warpgroup if CONFIG.paired else warpgroup, WARPGROUPS, (context, CONFIG)),
        [(producer_warp, (k_desc, rest_desc, scales_desc, ring, rows, keys, CONFIG))],
    )


@gluon.constexpr_function
def values_dtype(config, of_queries):
    """The dtype of values and probabilities: those times scales of keys may be outside of float16's range, and numbers
    of rows of 656 bytes are rounded to that of queries.
    """
    if config.packed:
        return of_queries
    return gl.bfloat16 if config.v_scales == "key" else gl.float16


@gluon.jit
def warpgroup(W: gl.constexpr, context, CONFIG: gl.constexpr):
    """The partition that takes the blocks `W`, `W + WARPGROUPS` and so on."""
    N: gl.constexpr = CONFIG.block_m
    WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    STAGES: gl.constexpr = CONFIG.stages
    ring = context.ring
    tile = tile_of(context.rows, context.keys, CONFIG)
    state = row_state(context, tile, CONFIG)
    row_max = gl.full([N], -FLOAT_MAX, gl.float32, gl.SliceLayout(0, product_layout(N)))
    l = no_sums(N)  # noqa: E741
    acc = ()
    for _ in gl.static_range(CHUNKS):
        acc = acc + (gl.zeros([CHUNK, N], gl.float32, product_layout(N)),)
    for n in range(tile.lo + W, tile.hi, WARPGROUPS):
        count = n - tile.lo
        page = page_of(context.keys, tile, n, CONFIG)
        stage = stage_of(count, STAGES)
        scales = scales_of_rows(ring, stage, CONFIG)
        consumer_wait(ring, count, STAGES)
        t = visible_scores(context, state, tile, n, page, scales, stage, CONFIG)
        largest = gl.minimum(gl.maximum(row_max, largest_of_scores(t)), FLOAT_MAX)
        alpha = gl.exp2(row_max - largest)
        row_max = largest
        p = probabilities(t, row_max)
        l = rescaled(l, alpha) + sums_of_threads(p)  # noqa: E741
        put_probabilities(context, p, tile, n, page, W, CONFIG)
        thread_barrier()
        acc = add_values(ring, context.p[W], rescale(acc, alpha), scales, stage, 0, CONFIG)
        consumer_release(empty_barriers(CONFIG), count, STAGES)
    finish(W, context, tile, acc, row_max, gl.convert_layout(gl.sum(gl.sum(l, 1), 0), row_max.type.layout), CONFIG)


@gluon.jit
def finish(W: gl.constexpr, context, tile, acc, row_max, l, CONFIG: gl.constexpr):  # noqa: E741
    """Add up the sums of all warpgroups in the first one, and store the tile."""
    N: gl.constexpr = CONFIG.block_m
    WARPGROUPS: gl.constexpr = CONFIG.num_warpgroups
    of_columns: gl.constexpr = row_max.type.layout
    stats, sums = context.sums.stats, context.sums
    if WARPGROUPS > 1:
        thread_barrier()
        mbarrier.arrive(sums.read.index(0), count=1)
        mbarrier.wait(sums.read.index(0), 0)
        if W > 0:
            stats.index(2 * W).store(row_max)
            stats.index(2 * W + 1).store(l)
            for c in gl.static_range(CHUNKS):
                place_of_sums(context.ring, c, W, N, WARPGROUPS).store(acc[c])
        thread_barrier()
        mbarrier.arrive(sums.there.index(0), count=1)
    if W == 0:
        if WARPGROUPS > 1:
            mbarrier.wait(sums.there.index(0), 0)
            for other in gl.static_range(1, WARPGROUPS):
                its_max, its_l = stats.index(2 * other).load(of_columns), stats.index(2 * other + 1).load(of_columns)
                largest = gl.maximum(row_max, its_max)
                own, its = gl.exp2(row_max - largest), gl.exp2(its_max - largest)
                l = l * own + its_l * its  # noqa: E741
                row_max = largest
                added = ()
                for c in gl.static_range(CHUNKS):
                    x = place_of_sums(context.ring, c, other, N, WARPGROUPS).load(acc[c].type.layout)
                    added = added + (acc[c] * gl.expand_dims(own, 0) + x * gl.expand_dims(its, 0),)
                acc = added
        store(context, tile, acc, row_max, l, 0, CONFIG)


@gluon.jit
def place_of_sums(ring, c: gl.constexpr, W: gl.constexpr, N: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Memory of stages for a chunk's sums of a warpgroup but the first, `[CHUNK, N]` fp32."""
    shape: gl.constexpr = [(WARPGROUPS - 1) * CHUNKS, CHUNK, N]
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return reinterpret_smem(ring.latent, gl.float32, shape, layout).index((W - 1) * CHUNKS + c)
