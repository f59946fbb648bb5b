"""What the warpgroup of the scores hands to the warpgroup of the other columns: p of each block, and factors of rows.

Each thread reads what the same thread of the other warpgroup wrote, so that shared memory needs no fence for the matrix
units: p reaches them in registers. A tile's blocks are items, and what divides its results is one more.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..shared.column_masks import all_visible
from ..shared.compat import thread_barrier
from ..shared.mma import MMA_M
from ..shared.pipeline import make_mbarriers

UNCHANGED = gl.constexpr(-1.0)  # no factor


class Handoff(NamedTuple):
    """Shared memory for one item."""

    p: gl.shared_memory_descriptor  # [MMA_M, BLOCK_N], 16 bits
    factors: gl.shared_memory_descriptor  # [MMA_M, 4] fp32, one for each thread of a row
    full: gl.shared_memory_descriptor  # [1, 1] mbarriers
    empty: gl.shared_memory_descriptor


@gluon.jit
def make_handoff(dtype: gl.constexpr, BLOCK_N: gl.constexpr):
    shape: gl.constexpr = [MMA_M, BLOCK_N]
    return Handoff(
        gl.allocate_shared_memory(dtype, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype)),
        gl.allocate_shared_memory(gl.float32, [MMA_M, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        make_mbarriers(1, 1),
        make_mbarriers(1, 1),
    )


@gluon.jit
def send_block(handoff, p, alpha, changed, item):
    """Hand over p and what rescales the sums of the blocks before. A warp whose rows keep theirs sends UNCHANGED, so
    that the other warpgroup's warp branches as a whole, too.
    """
    mbarrier.wait(handoff.empty.index(0), (item & 1) ^ 1)
    handoff.p.store(p)
    handoff.factors.store(gl.where(changed != 0, alpha, UNCHANGED))
    thread_barrier()
    mbarrier.arrive(handoff.full.index(0), count=1)


@gluon.jit
def send_end(handoff, t, inv_l, item):
    """Hand over `inv_l [MMA_M]`, which normalizes a tile's sums, in place of alpha. `t` has the layout of scores."""
    layout: gl.constexpr = all_visible(t).type.layout
    factors = gl.expand_dims(gl.convert_layout(inv_l, gl.SliceLayout(1, layout)), 1)
    mbarrier.wait(handoff.empty.index(0), (item & 1) ^ 1)
    handoff.factors.store(factors + gl.zeros([MMA_M, 4], gl.float32, layout))
    thread_barrier()
    mbarrier.arrive(handoff.full.index(0), count=1)


@gluon.jit
def receive_block(handoff, acc, item):
    """p as the left operand of its product with values, alpha `[MMA_M, 4]`, and whether it changes the warp's sums."""
    layout: gl.constexpr = gl.DotOperandLayout(0, acc[0].type.layout, 2)
    mbarrier.wait(handoff.full.index(0), item & 1)
    p = handoff.p.load(layout)
    alpha = load_factors(handoff, acc)
    release(handoff)
    return p, alpha, (alpha != UNCHANGED).to(gl.int32)


@gluon.jit
def receive_end(handoff, acc, item):
    """What normalizes a tile's sums, `[MMA_M, 4]`."""
    mbarrier.wait(handoff.full.index(0), item & 1)
    factors = load_factors(handoff, acc)
    release(handoff)
    return factors


@gluon.jit
def load_factors(handoff, acc):
    layout: gl.constexpr = all_visible(acc[0]).type.layout
    return handoff.factors.load(layout)


@gluon.jit
def release(handoff):
    """Signal that all threads have read the item."""
    thread_barrier()
    mbarrier.arrive(handoff.empty.index(0), count=1)
