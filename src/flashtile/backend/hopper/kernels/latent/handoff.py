"""What the two warpgroups hand to each other in turn: p of a block and the state of the softmax after it.

One item has room: the warpgroup that writes an item has read the one before. As in `wide.handoff`, each warp reads what
the same warp of the other warpgroup wrote.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..forward.mainloop import zero_scores
from ..shared.column_masks import all_visible
from ..shared.compat import thread_barrier
from ..shared.mma import MMA_M
from ..shared.pipeline import make_mbarriers

UNCHANGED = gl.constexpr(-1.0)  # no factor


class Handoff(NamedTuple):
    """Shared memory for one item; `full[n]` signals those of warpgroup n."""

    p: gl.shared_memory_descriptor  # [MMA_M, MMA_M], 16 bits
    row_max: gl.shared_memory_descriptor  # [MMA_M, 4] fp32, one for each thread of a row
    factors: gl.shared_memory_descriptor  # [MMA_M, 4] fp32
    full: tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor]  # [1, 1] mbarriers


@gluon.jit
def make_handoff(dtype: gl.constexpr):
    shape: gl.constexpr = [MMA_M, MMA_M]
    of_threads: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    return Handoff(
        gl.allocate_shared_memory(dtype, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype)),
        gl.allocate_shared_memory(gl.float32, [MMA_M, 4], of_threads),
        gl.allocate_shared_memory(gl.float32, [MMA_M, 4], of_threads),
        (make_mbarriers(1, 1), make_mbarriers(1, 1)),
    )


@gluon.jit
def send_block(handoff, p, row_max, alpha, changed, warpgroup: gl.constexpr):
    """Hand over p, row_max, and what rescales the sums of the blocks before. A warp whose rows keep theirs sends
    UNCHANGED, so that the other warpgroup's warp branches as a whole, too.
    """
    handoff.p.store(p)
    handoff.row_max.store(row_max)
    handoff.factors.store(gl.where(changed != 0, alpha, UNCHANGED))
    signal(handoff, warpgroup)


@gluon.jit
def receive_block(handoff, acc, item, warpgroup: gl.constexpr):
    """Item number `item` of the other warpgroup: p as the left operand of its product with values, row_max, alpha
    `[MMA_M, 4]`, and whether it changes the warp's sums.
    """
    mbarrier.wait(handoff.full[1 - warpgroup].index(0), item & 1)
    p = handoff.p.load(gl.DotOperandLayout(0, acc[0].type.layout, 2))
    layout: gl.constexpr = all_visible(zero_scores(MMA_M)).type.layout
    row_max = handoff.row_max.load(layout)
    factors = handoff.factors.load(layout)
    changed = (factors != UNCHANGED).to(gl.int32)
    return p, row_max, gl.where(changed != 0, factors, 1.0), changed


@gluon.jit
def send_sums(handoff, l, warpgroup: gl.constexpr):  # noqa: E741
    """Hand over the sums of a warpgroup's own p, behind its last item."""
    handoff.factors.store(l)
    signal(handoff, warpgroup)


@gluon.jit
def receive_sums(handoff, item, warpgroup: gl.constexpr):
    layout: gl.constexpr = all_visible(zero_scores(MMA_M)).type.layout
    mbarrier.wait(handoff.full[1 - warpgroup].index(0), item & 1)
    return handoff.factors.load(layout)


@gluon.jit
def signal(handoff, warpgroup: gl.constexpr):
    thread_barrier()
    mbarrier.arrive(handoff.full[warpgroup].index(0), count=1)
