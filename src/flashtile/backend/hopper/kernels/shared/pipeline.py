"""Rings of shared memory between the warp that copies and the warpgroups that compute.

A slot is handed over twice: by a barrier in memory when the copy engine has written it, whose phase flips with every
round, and by a gate when every reader has let go. A gate is one of the chip's 16 named barriers: each warp arrives for
itself, where a barrier in memory would have a warpgroup meet first. The n-th use of a ring takes slot `n % STAGES`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .versions import load_box

FIRST_GATE, LAST_GATE = gl.constexpr(7), gl.constexpr(15)  # Triton numbers its own from below


class Gates(NamedTuple):
    """Named barriers, one for each slot."""

    first: gl.constexpr
    threads: gl.constexpr  # those who arrive and those who wait


class Slots(NamedTuple):
    data: tuple[gl.shared_memory_descriptor, ...]  # of each chunk of columns, [STAGES, *rows, chunk]
    full: gl.shared_memory_descriptor  # [STAGES, 1]


class Ring(NamedTuple):
    """Slots and their gates."""

    data: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    gates: Gates


@gluon.jit
def barriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """`[STAGES, 1]` barriers, each of which waits for `COUNT` arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(found.index(n), count=COUNT)
    return found


@gluon.jit
def new_slots(desc, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Slots of rows, which the descriptor's boxes fill side by side."""
    return Slots(new_memories(desc, STAGES, HEAD_DIM), barriers(STAGES, 1))


@gluon.jit
def new_ring(desc, STAGES: gl.constexpr, gates, HEAD_DIM: gl.constexpr):
    slots = new_slots(desc, STAGES, HEAD_DIM)
    return Ring(slots.data, slots.full, gates)


@gluon.jit
def new_memories(desc, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Shared memory for each chunk."""
    found = ()
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        found = found + (new_memory(desc, STAGES, HEAD_DIM.chunks[c]),)
    return found


@gluon.jit
def new_memory(desc, STAGES: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for boxes that lie side by side, WIDTH columns together. What is wider than the swizzle lies in
    panels of the swizzle's width anyway.
    """
    shape: gl.constexpr = [STAGES] + desc.block_type.shape[:-1] + [WIDTH]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def fill(ring, desc, coordinates, n, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start the copy that is the ring's n-th, once its slot is free."""
    slot = slot_of(n, STAGES)
    wait_free(ring.gates, n, STAGES)
    expect_rows(ring, desc, slot, HEAD_DIM)
    load_rows(ring, desc, coordinates, slot, HEAD_DIM)


@gluon.jit
def expect_rows(ring, desc, slot, HEAD_DIM: gl.constexpr):
    mbarrier.expect(ring.full.index(slot), HEAD_DIM.boxes * desc.block_type.nbytes)


@gluon.jit
def load_rows(ring, desc, coordinates, slot, HEAD_DIM: gl.constexpr):
    """Start the copies to a slot that is free and expects them. Coordinates are those of the first box."""
    BOX: gl.constexpr = HEAD_DIM.box
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        for n in gl.static_range(HEAD_DIM.chunks[c] // BOX):
            at = coordinates[:-1] + (HEAD_DIM.starts[c] + n * BOX,)
            load_box(desc, at, ring.full.index(slot), columns_of(ring.data[c].index(slot), n * BOX, BOX))


@gluon.jit
def columns_of(memory, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of some memory, from FIRST on."""
    if memory.shape[-1] == WIDTH:
        return memory
    else:
        return memory.slice(FIRST, WIDTH, dim=len(memory.shape) - 1)


@gluon.jit
def slot_of(n, STAGES: gl.constexpr):
    """`n % STAGES`, of which the compiler does not know that n is not negative."""
    if STAGES & (STAGES - 1) == 0:
        return n & (STAGES - 1)
    else:
        return n % STAGES


@gluon.jit
def round_of(n, STAGES: gl.constexpr):
    """`n // STAGES`."""
    if STAGES & (STAGES - 1) == 0:
        return n >> (STAGES.bit_length() - 1)
    else:
        return n // STAGES


@gluon.jit
def wait_full(ring, n, STAGES: gl.constexpr):
    mbarrier.wait(ring.full.index(slot_of(n, STAGES)), round_of(n, STAGES) & 1)


@gluon.jit
def wait_free(gates, n, STAGES: gl.constexpr):
    if n >= STAGES:
        wait_at(gates.first + slot_of(n, STAGES), gates.threads)


@gluon.jit
def release(gates, n, STAGES: gl.constexpr):
    arrive_at(gates.first + slot_of(n, STAGES), gates.threads)


@gluon.jit
def rows_of(ring, n, STAGES: gl.constexpr):
    """The n-th rows as matrices in shared memory `[rows, chunk]`."""
    found = ()
    for c in gl.static_range(len(ring.data)):
        found = found + (as_matrix(ring.data[c].index(slot_of(n, STAGES))),)
    return found


@gluon.jit
def as_matrix(memory):
    """Memory without the dimensions of 1 that boxes have."""
    return memory.reshape([memory.shape[-2], memory.shape[-1]])


@gluon.jit
def wait_at(gate, threads):
    """Waits at a named barrier until so many threads have arrived, those who wait included."""
    gl.inline_asm_elementwise(
        "bar.sync $1, $2; mov.b32 $0, $1;", "=r,r,r,~{memory}", [gate, threads], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def arrive_at(gate, threads):
    """Arrives at a named barrier and goes on."""
    gl.inline_asm_elementwise(
        "bar.arrive $1, $2; mov.b32 $0, $1;", "=r,r,r,~{memory}", [gate, threads], dtype=gl.int32, is_pure=False, pack=1
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
