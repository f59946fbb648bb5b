"""Multi-stage pipelines of shared memory between a producer warp and consumer warpgroups.

TMA signals that a stage is full through an mbarrier, whose phase flips with every wrap around the stages. Consumers
signal that a stage is empty through one of the SM's 16 named barriers: each warp arrives on its own, where an mbarrier
would first synchronize the warpgroup. Use number `count` of a pipeline takes stage `count % STAGES`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .compat import tma_load
from .ptx import barrier_arrive, barrier_sync, opaque

FIRST_BARRIER, LAST_BARRIER = gl.constexpr(7), gl.constexpr(15)  # Triton's own named barriers count from 0


class NamedBarriers(NamedTuple):
    """Consecutive named barriers, one for each stage."""

    first: gl.constexpr
    threads: gl.constexpr  # arriving and waiting ones


class SmemBuffers(NamedTuple):
    """Shared memory of the stages and their full barriers."""

    data: tuple[gl.shared_memory_descriptor, ...]  # for each chunk, [STAGES, *rows, chunk]
    full: gl.shared_memory_descriptor  # [STAGES, 1]


class Pipeline(NamedTuple):
    """Buffers with named barriers for empty stages."""

    data: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor  # of chunks that are loaded apart, a tuple of [1, 1]
    empty: NamedBarriers


@gluon.jit
def make_mbarriers(STAGES: gl.constexpr, COUNT: gl.constexpr):
    """`[STAGES, 1]` mbarriers, each completed by COUNT arrivals."""
    mbarriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(STAGES):
        mbarrier.init(mbarriers.index(n), count=COUNT)
    return mbarriers


@gluon.jit
def make_buffers(desc, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, BOXES: gl.constexpr = 1):
    """Buffers for STAGES blocks of rows, each of BOXES boxes below each other."""
    return SmemBuffers(allocate_chunks(desc, STAGES, HEAD_DIM, BOXES), make_mbarriers(STAGES, 1))


@gluon.jit
def make_pipeline(desc, STAGES: gl.constexpr, empty, HEAD_DIM: gl.constexpr, BOXES: gl.constexpr = 1):
    """A pipeline of STAGES blocks of rows, each of BOXES boxes below each other."""
    if HEAD_DIM.apart:
        gl.static_assert(STAGES == 1)
        LOADS: gl.constexpr = HEAD_DIM.loads
        full = ()
        for _ in gl.static_range(LOADS):  # waits for barriers of one array would synchronize the warpgroup
            full = full + (make_mbarriers(1, 1),)
        return Pipeline(allocate_chunks(desc, 1, HEAD_DIM, BOXES), full, empty)
    else:
        buffers = make_buffers(desc, STAGES, HEAD_DIM, BOXES)
        return Pipeline(buffers.data, buffers.full, empty)


@gluon.jit
def allocate_chunks(desc, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr, BOXES: gl.constexpr = 1):
    """Shared memory for each chunk of a head dimension, for BOXES boxes below each other."""
    buffers = ()
    for c in gl.static_range(len(HEAD_DIM.smem_chunks)):
        buffers = buffers + (allocate_boxes(desc, STAGES, HEAD_DIM.smem_chunks[c], BOXES),)
    return buffers


@gluon.jit
def allocate_boxes(desc, STAGES: gl.constexpr, WIDTH: gl.constexpr, BOXES: gl.constexpr = 1):
    """Shared memory for boxes side by side, WIDTH columns in all, and for BOXES below each other.

    Columns beyond the swizzle's width lie in further panels of that width, as the layout of a wide box has them.
    """
    shape: gl.constexpr = [STAGES] + desc.block_type.shape[:-2] + [BOXES * desc.block_type.shape[-2], WIDTH]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def acquire_and_load(pipeline, desc, coord, count, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Wait until the stage of load number `count` is empty, and start the load; of chunks that are loaded apart, one
    after another.
    """
    LOADS: gl.constexpr = HEAD_DIM.loads
    if HEAD_DIM.apart:
        for c in gl.static_range(LOADS):
            full = pipeline.full[c].index(0)
            producer_acquire(chunk_empty(pipeline, c), count, 1)
            mbarrier.expect(full, HEAD_DIM.smem_chunks[c] // HEAD_DIM.box * desc.block_type.nbytes)
            load_chunk(pipeline, desc, coord, 0, full, c, HEAD_DIM)
    else:
        stage = stage_of(count, STAGES)
        producer_acquire(pipeline.empty, count, STAGES)
        expect_bytes(pipeline, desc, stage, HEAD_DIM)
        load_boxes(pipeline, desc, coord, stage, HEAD_DIM)


@gluon.jit
def chunk_empty(pipeline, c: gl.constexpr):
    """The barrier of one of the chunks that are loaded apart."""
    return NamedBarriers(pipeline.empty.first + c, pipeline.empty.threads)


@gluon.jit
def chunk_wait(pipeline, c: gl.constexpr, count):
    """Wait until load number `count` of one of the chunks that are loaded apart is there; return its matrix."""
    mbarrier.wait(pipeline.full[c].index(0), count & 1)
    return as_matrix(pipeline.data[c].index(0))


@gluon.jit
def leave_unwritten(pipeline, HEAD_DIM: gl.constexpr):
    """Let load number 0 be none: its stage stays unwritten."""
    LOADS: gl.constexpr = HEAD_DIM.loads
    for c in gl.static_range(LOADS):
        mbarrier.arrive(full_of(pipeline, 0, c, HEAD_DIM), count=1)


@gluon.jit
def full_of(pipeline, stage, c: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The full barrier of a stage, or of one of the chunks that are loaded apart."""
    if HEAD_DIM.apart:
        return pipeline.full[c].index(0)
    else:
        return pipeline.full.index(stage)


@gluon.jit
def expect_bytes(pipeline, desc, stage, HEAD_DIM: gl.constexpr):
    """Announce the bytes of one stage to its full barrier."""
    mbarrier.expect(pipeline.full.index(stage), HEAD_DIM.num_boxes * desc.block_type.nbytes)


@gluon.jit
def load_boxes(pipeline, desc, coord, stage, HEAD_DIM: gl.constexpr):
    """Start the TMA loads of an empty stage whose bytes were announced; `coord` is that of the first box."""
    for c in gl.static_range(len(HEAD_DIM.smem_chunks)):
        load_chunk(pipeline, desc, coord, stage, pipeline.full.index(stage), c, HEAD_DIM)


@gluon.jit
def load_chunk(pipeline, desc, coord, stage, full, c: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Start the TMA loads of one chunk."""
    BOX: gl.constexpr = HEAD_DIM.box
    for n in gl.static_range(HEAD_DIM.smem_chunks[c] // BOX):
        box_coord = coord[:-1] + (HEAD_DIM.offsets[c] + n * BOX,)
        tma_load(desc, box_coord, full, slice_columns(pipeline.data[c].index(stage), n * BOX, BOX))


@gluon.jit
def slice_columns(smem, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    """WIDTH columns of shared memory, from FIRST on."""
    if smem.shape[-1] == WIDTH:
        return smem
    else:
        return smem.slice(FIRST, WIDTH, dim=len(smem.shape) - 1)


@gluon.jit
def stage_of(count, STAGES: gl.constexpr):
    """`count % STAGES`; the compiler does not know that count is not negative."""
    if STAGES & (STAGES - 1) == 0:
        return count & (STAGES - 1)
    else:
        return count % STAGES


@gluon.jit
def wraps_of(count, STAGES: gl.constexpr):
    """`count // STAGES`, whose parity is the phase of a barrier."""
    if STAGES & (STAGES - 1) == 0:
        return count >> (STAGES.bit_length() - 1)
    else:
        return count // STAGES


@gluon.jit
def consumer_wait(pipeline, count, STAGES: gl.constexpr):
    """Wait until the stage is full."""
    mbarrier.wait(pipeline.full.index(stage_of(count, STAGES)), wraps_of(count, STAGES) & 1)


@gluon.jit
def producer_acquire(empty, count, STAGES: gl.constexpr):
    """Wait until the stage is empty; at first all are."""
    if count >= STAGES:
        barrier_sync(empty.first + stage_of(count, STAGES), empty.threads)


@gluon.jit
def consumer_release(empty, count, STAGES: gl.constexpr):
    """Signal that this warp has read the stage."""
    barrier_arrive(empty.first + stage_of(count, STAGES), empty.threads)


@gluon.jit
def stage_chunks(pipeline, count, STAGES: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The stage's chunks as matrices `[rows, chunk]`."""
    chunks = ()
    stage = stage_of(count, STAGES)
    if HEAD_DIM.parts > 1:  # no registers for precomputed addresses of all chunks
        stage = opaque(stage)
    for c in gl.static_range(len(HEAD_DIM.smem_chunks)):
        smem = as_matrix(pipeline.data[c].index(stage))
        chunks = chunks + (slice_columns(smem, 0, HEAD_DIM.chunks[c % len(HEAD_DIM.chunks)]),)
    return chunks


@gluon.jit
def as_matrix(smem):
    """Shared memory without the leading dimensions of size 1 that boxes have."""
    return smem.reshape([smem.shape[-2], smem.shape[-1]])
