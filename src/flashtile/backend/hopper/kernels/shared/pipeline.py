"""Rings of shared memory between the warp that copies and the warpgroups that compute.

A slot is handed over twice: by a barrier in memory when the copy engine has written it, whose phase flips with every
round, and by a gate when every reader has let go. A gate is one of the chip's 16 named barriers: each warp arrives for
itself, where a barrier in memory would have a warpgroup meet first. The n-th use of a ring takes slot `n % STAGES`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import tma_load
from .ptx import barrier_arrive, barrier_sync

FIRST_BARRIER, LAST_BARRIER = gl.constexpr(7), gl.constexpr(15)  # Triton numbers its own from below


class NamedBarriers(NamedTuple):
    """Named barriers, one for each slot."""

    first: gl.constexpr
    threads: gl.constexpr  # those who arrive and those who wait


class SmemBuffers(NamedTuple):
    data: tuple[gl.shared_memory_descriptor, ...]  # of each chunk of columns, [STAGES, *rows, chunk]
    full: gl.shared_memory_descriptor  # [STAGES, 1]


class Pipeline(NamedTuple):
    """Slots and their gates."""

    data: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    empty: NamedBarriers


@gluon.jit
def make_mbarriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """`[STAGES, 1]` barriers, each of which waits for `COUNT` arrivals."""
    mbarriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(mbarriers.index(n), count=COUNT)
    return mbarriers


@gluon.jit
def make_buffers(desc, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Slots of rows, which the descriptor's boxes fill side by side."""
    return SmemBuffers(allocate_chunks(desc, STAGES, HEAD_DIM), make_mbarriers(STAGES, 1))


@gluon.jit
def make_pipeline(desc, STAGES: gl.constexpr, empty, HEAD_DIM: gl.constexpr):
    buffers = make_buffers(desc, STAGES, HEAD_DIM)
    return Pipeline(buffers.data, buffers.full, empty)


@gluon.jit
def allocate_chunks(desc, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Shared memory for each chunk."""
    buffers = ()
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        buffers = buffers + (allocate_boxes(desc, STAGES, HEAD_DIM.chunks[c]),)
    return buffers


@gluon.jit
def allocate_boxes(desc, STAGES: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for boxes that lie side by side, WIDTH columns together. What is wider than the swizzle lies in
    panels of the swizzle's width anyway.
    """
    shape: gl.constexpr = [STAGES] + desc.block_type.shape[:-1] + [WIDTH]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def acquire_and_load(pipeline, desc, coord, count, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start the copy that is the ring's n-th, once its slot is free."""
    stage = stage_of(count, STAGES)
    producer_acquire(pipeline.empty, count, STAGES)
    expect_bytes(pipeline, desc, stage, HEAD_DIM)
    load_boxes(pipeline, desc, coord, stage, HEAD_DIM)


@gluon.jit
def expect_bytes(pipeline, desc, stage, HEAD_DIM: gl.constexpr):
    mbarrier.expect(pipeline.full.index(stage), HEAD_DIM.num_boxes * desc.block_type.nbytes)


@gluon.jit
def load_boxes(pipeline, desc, coord, stage, HEAD_DIM: gl.constexpr):
    """Start the copies to a slot that is free and expects them. Coordinates are those of the first box."""
    BOX: gl.constexpr = HEAD_DIM.box
    for c in gl.static_range(len(HEAD_DIM.chunks)):
        for n in gl.static_range(HEAD_DIM.chunks[c] // BOX):
            box_coord = coord[:-1] + (HEAD_DIM.offsets[c] + n * BOX,)
            tma_load(
                desc, box_coord, pipeline.full.index(stage), slice_columns(pipeline.data[c].index(stage), n * BOX, BOX)
            )


@gluon.jit
def slice_columns(smem, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of some memory, from FIRST on."""
    if smem.shape[-1] == WIDTH:
        return smem
    else:
        return smem.slice(FIRST, WIDTH, dim=len(smem.shape) - 1)


@gluon.jit
def stage_of(count, STAGES: gl.constexpr):
    """`n % STAGES`, of which the compiler does not know that n is not negative."""
    if STAGES & (STAGES - 1) == 0:
        return count & (STAGES - 1)
    else:
        return count % STAGES


@gluon.jit
def wraps_of(count, STAGES: gl.constexpr):
    """`n // STAGES`."""
    if STAGES & (STAGES - 1) == 0:
        return count >> (STAGES.bit_length() - 1)
    else:
        return count // STAGES


@gluon.jit
def consumer_wait(pipeline, count, STAGES: gl.constexpr):
    mbarrier.wait(pipeline.full.index(stage_of(count, STAGES)), wraps_of(count, STAGES) & 1)


@gluon.jit
def producer_acquire(empty, count, STAGES: gl.constexpr):
    if count >= STAGES:
        barrier_sync(empty.first + stage_of(count, STAGES), empty.threads)


@gluon.jit
def consumer_release(empty, count, STAGES: gl.constexpr):
    barrier_arrive(empty.first + stage_of(count, STAGES), empty.threads)


@gluon.jit
def stage_chunks(pipeline, count, STAGES: gl.constexpr):
    """The n-th rows as matrices in shared memory `[rows, chunk]`."""
    chunks = ()
    for c in gl.static_range(len(pipeline.data)):
        chunks = chunks + (as_matrix(pipeline.data[c].index(stage_of(count, STAGES))),)
    return chunks


@gluon.jit
def as_matrix(smem):
    """Memory without the dimensions of 1 that boxes have."""
    return smem.reshape([smem.shape[-2], smem.shape[-1]])
