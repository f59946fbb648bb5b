"""Kernel that finds which pairs of partly visible blocks a mask shows, as bits (`shared.block_lists`), once for all
heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...gpu.grouped import without
from .shared.block_lists import words_of_place
from .shared.column_masks import bits_of
from .shared.compat import Pointer, Scalar, kernel, thread_barrier
from .shared.mma import MMA_M
from .shared.pairs import PairTensor
from .shared.score_mod import PairInputs

MaskTensor = without(PairTensor, "stride_h")


@kernel
def pair_bits_kernel(
    queue: Pointer, queue_size: Pointer, mask_bits: Pointer, mask: MaskTensor, stride_lists: Scalar, num_tiles: Scalar,
    seqlen_q: Scalar, seqlen_k: Scalar, inputs: PairInputs, CONFIG: gl.constexpr,
):  # fmt: skip
    """Store the bits of all entries of lists in a queue, MMA_M lines of a tile at a time. Lines are rows, and columns
    keys, or with CONFIG.of_keys the other way round. The mask is a tensor or a function.

    Where a document begins in a tile, all entries of its list are partly visible, and few elsewhere: from a queue, all
    programs have as many.
    """
    COLUMNS: gl.constexpr = CONFIG.columns
    PARTS: gl.constexpr = CONFIG.lines // MMA_M
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    x = gl.zeros([MMA_M, COLUMNS], gl.float32, layout)
    for item in range(gl.program_id(0), gl.load(queue_size) * PARTS, gl.num_programs(0)):
        word = gl.load(queue + item // PARTS)
        part, place, entry = item % PARTS, word.to(gl.int32), (word >> 32).to(gl.int32)
        number = place // stride_lists
        b, tile = number // num_tiles, number % num_tiles
        line = gl.expand_dims(tile * CONFIG.lines + part * MMA_M + gl.arange(0, MMA_M, gl.SliceLayout(1, layout)), 1)
        column = gl.expand_dims((entry >> 1) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
        if CONFIG.of_keys:
            row, key = column, line
        else:
            row, key = line, column
        if mask.data is None:
            visible = shows(b, row, key, CONFIG, inputs)
        else:
            at = b.to(gl.int64) * mask.stride_b + row.to(gl.int64) * mask.stride_m + key * mask.stride_n
            visible = gl.load(mask.data + at, mask=(row < seqlen_q) & (key < seqlen_k), other=0) != 0
        words = words_of_place(place, part * MMA_M, x, CONFIG.lines)
        gl.store(mask_bits + words, bits_of(visible & (x == 0.0)))  # of every pair
    reset_queue(queue_size)


@gluon.jit
def reset_queue(queue_size):
    """Empty the queue, once all programs have read its size."""
    thread_barrier()
    if gl.atomic_add(queue_size + 1, 1, sem="acq_rel") == gl.num_programs(0) - 1:
        gl.store(queue_size, 0)
        gl.store(queue_size + 1, 0)


@gluon.jit
def shows(b, row, key, CONFIG: gl.constexpr, inputs):
    """Whether the mask's function shows pairs; of fewer dimensions where it does not depend on all."""
    return CONFIG.score_mod.function(b + inputs.b0, inputs.h0, row + inputs.i0, key + inputs.j0, inputs.captured)[0]
