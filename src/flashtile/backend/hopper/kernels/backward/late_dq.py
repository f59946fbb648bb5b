"""dq of a block one step later, added to its sums in memory from registers.

The product of a block's dq runs during the next block's exponentials, so that the warpgroups do not wait for each
other's ds, and the matrix units have work while ds is computed. Sums have no order, and need no warps that write them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ..shared.compat import reinterpret_smem, thread_barrier, tma_reduce_add, tma_store
from ..shared.mma import MMA_M, split_columns
from ..shared.pipeline import FIRST_BARRIER, as_matrix, slice_columns, stage_of
from ..shared.ptx import add_in_fours, barrier_arrive, barrier_sync
from ..shared.swizzle import swizzled
from .dq_share import CONSUMER_THREADS, DS_BARRIER, NUM_WARPGROUPS, issue_dq

LATE_DS_STAGES = gl.constexpr(4)  # a power of two; a warpgroup stores ds while the other one reads that of two blocks
# One barrier for ds of even blocks and one for odd ones, of each warpgroup. Two partitions fewer leave two to us.
FIRST_DS_BARRIER, SECOND_DS_BARRIER = gl.constexpr(FIRST_BARRIER - 2), gl.constexpr(DS_BARRIER - 1)


@gluon.jit
def announce_ds(count, warpgroup: gl.constexpr):
    """Tell the other warpgroup that ds of block number `count` is stored."""
    barrier_arrive(ds_barrier(warpgroup) + (count & 1), CONSUMER_THREADS)


@gluon.jit
def start_late_dq(ds, k, count, exists, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Issue the warpgroup's share of the dq of block number `count`; if there is none, of what is in memory."""
    if exists:
        barrier_sync(ds_barrier(1 - warpgroup) + (count & 1), CONSUMER_THREADS)
    fence_async_shared()  # for both warpgroups' stores, complete since the barrier
    return issue_dq(ds, k, stage_of(count, LATE_DS_STAGES) * NUM_WARPGROUPS, warpgroup, CONFIG)


@gluon.jit
def ds_barrier(warpgroup: gl.constexpr):
    """The warpgroup's barrier for even blocks."""
    if warpgroup == 0:
        return FIRST_DS_BARRIER
    else:
        return SECOND_DS_BARRIER


@gluon.jit
def add_dq(accum, row, dq, warpgroup: gl.constexpr, CONFIG: gl.constexpr):
    """Add a share of dq to its sums; `row` is that of the block's first row."""
    SHARE: gl.constexpr = CONFIG.dq_shares[warpgroup]
    WIDTH: gl.constexpr = CONFIG.head_dim.width
    dq = swizzled(dq, CONFIG.dq_box)
    layout: gl.constexpr = dq.type.layout
    rows = gl.expand_dims(gl.arange(0, MMA_M, gl.SliceLayout(1, layout)), 1)
    columns = gl.expand_dims(gl.arange(0, SHARE.width, gl.SliceLayout(0, layout)), 0)
    base = accum + ((row + SHARE.row).to(gl.int64) * WIDTH + SHARE.column)
    add_in_fours(base + (rows * WIDTH + columns), dq)


@gluon.jit
def store_late(
    desc, coord, x, scale, ds, count, warpgroup: gl.constexpr, stored: gl.constexpr, HEAD_DIM: gl.constexpr,
    ADD: gl.constexpr,
):  # fmt: skip
    """Store or add (ADD) dk or dv of 64 keys through the two stages of the warpgroup's ds that blocks `count` and
    `count + 1` would take: the other warpgroup may still read the two before. `stored` boxes went that way before.
    Returns their number.
    """
    for c in gl.static_range(len(x)):
        columns = x[c]
        if scale is not None:
            columns = columns * scale
        stored = store_boxes(desc, columns, coord, ds, count, warpgroup, stored, HEAD_DIM.offsets[c], ADD)
    return stored


@gluon.jit
def store_boxes(
    desc, x, coord, ds, count, warpgroup: gl.constexpr, stored: gl.constexpr, FIRST: gl.constexpr, ADD: gl.constexpr
):  # fmt: skip
    """Store or add columns from FIRST on, one box after the other."""
    BOX: gl.constexpr = desc.block_type.shape[-1]
    if x.shape[1] > BOX:
        left, right = split_columns(x)
        stored = store_boxes(desc, left, coord, ds, count, warpgroup, stored, FIRST, ADD)
        return store_boxes(desc, right, coord, ds, count, warpgroup, stored, FIRST + x.shape[1] // 2, ADD)
    else:
        tma.store_wait(1)  # TMA has read what the last box but one has stored
        thread_barrier()
        stage = stage_of(count + stored % 2, LATE_DS_STAGES) * NUM_WARPGROUPS + warpgroup
        buffer = reinterpret_smem(ds.index(stage), desc.dtype, desc.block_type.shape, desc.layout)
        slice_columns(as_matrix(buffer), 0, x.shape[1]).store(x.to(desc.dtype))
        fence_async_shared()
        box_coord = coord[:-1] + (FIRST,)  # TMA does not store columns past the head dimension
        if ADD:
            tma_reduce_add(desc, box_coord, buffer)
        else:
            tma_store(desc, box_coord, buffer)
        return stored + 1
