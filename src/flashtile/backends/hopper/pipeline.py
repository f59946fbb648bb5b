"""Rings of shared memory between the warp that copies and the warpgroups that compute.

A slot is handed over by two barriers: `full` when the copy engine has written it, `empty` when every reader has let go.
The n-th use of a ring takes slot `n % STAGES`, and each barrier's phase flips with every round.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .versions import load_box


class Ring(NamedTuple):
    data: gl.shared_memory_descriptor  # [STAGES, *box]
    full: gl.shared_memory_descriptor  # [STAGES, 1]
    empty: gl.shared_memory_descriptor  # [STAGES, 1]


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """`[STAGES, 1]` barriers, each of which waits for `COUNT` arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(found.index(n), count=COUNT)
    return found


@gluon.jit
def new_ring(desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """A ring of the descriptor's boxes; every reader arrives once for a slot."""
    data = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    return Ring(data, barriers(STAGES, 1), barriers(STAGES, READERS))


@gluon.jit
def fill(ring, desc, coordinates, n, STAGES: gl.constexpr):
    """Start the copy that is the ring's n-th, once its slot is free."""
    slot, phase = n % STAGES, (n // STAGES) & 1
    mbarrier.wait(ring.empty.index(slot), phase ^ 1)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    load_box(desc, coordinates, ring.full.index(slot), ring.data.index(slot))


@gluon.jit
def wait_full(ring, n, STAGES: gl.constexpr):
    mbarrier.wait(ring.full.index(n % STAGES), (n // STAGES) & 1)


@gluon.jit
def release(ring, n, STAGES: gl.constexpr):
    mbarrier.arrive(ring.empty.index(n % STAGES), count=1)


@gluon.jit
def rows_of(ring, n, STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """The n-th box as a matrix in shared memory `[ROWS, WIDTH]`."""
    return ring.data.index(n % STAGES).reshape([ROWS, WIDTH])


@gluon.jit
def both_warpgroups():
    """Waits until two warpgroups are here. Triton numbers its own barriers from below."""
    gl.inline_asm_elementwise(
        "bar.sync 8, 256; mov.b32 $0, $1;", "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def results_landed():
    """Waits until what this warpgroup gave to the copy engine has arrived in memory, not only left."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;",
        "=r,r",
        [gl.program_id(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def afresh(n):
    """`n`, of which the compiler knows nothing: what follows from it is not computed ahead of a loop and kept."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [n], dtype=gl.int32, is_pure=False, pack=1)
