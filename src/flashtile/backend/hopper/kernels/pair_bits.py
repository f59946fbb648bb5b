"""Kernel that finds which pairs of partly visible blocks a mask shows, as bits (`shared.block_lists`), once for all
heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .shared.block_lists import bit_words
from .shared.column_masks import bits_of
from .shared.compat import kernel
from .shared.mma import MMA_M

ENTRIES = gl.constexpr(32)  # that are loaded together: a warp's threads have one each


@kernel
def pair_bits_kernel(
    lists, mask_bits, mask, stride_mask_b, stride_mask_m, stride_mask_n, stride_lists, num_tiles, num_programs,
    seqlen_q, seqlen_k, CONFIG: gl.constexpr, inputs,
):  # fmt: skip
    """Store the bits of MMA_M lines of a tile, for every entry number `num_programs` of its list. Lines are rows, and
    columns keys, or with CONFIG.of_keys the other way round. The mask is a tensor or a function.

    Entries are loaded at once, with the list's length: this kernel is short, and one wait after another would be all of
    its time.
    """
    COLUMNS: gl.constexpr = CONFIG.columns
    PARTS: gl.constexpr = CONFIG.lines // MMA_M
    WARPS: gl.constexpr = gl.num_warps() // 4  # that share the columns
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WARPS], [16, COLUMNS // WARPS, 16])
    in_list: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    part, program = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS
    own, number = program % num_programs, program // num_programs
    b, tile = number // num_tiles, number % num_tiles
    x = gl.zeros([MMA_M, COLUMNS], gl.float32, layout)
    line = gl.expand_dims(tile * CONFIG.lines + part * MMA_M + gl.arange(0, MMA_M, gl.SliceLayout(1, layout)), 1)
    offset = number * stride_lists
    length = gl.load(lists + offset)
    slot = gl.arange(0, ENTRIES, in_list)
    for first in range(own, stride_lists - 1, ENTRIES * num_programs):
        positions = first + slot * num_programs
        entries = gl.load(lists + (offset + 1 + positions), mask=positions < stride_lists - 1, other=0)
        for n in range(gl.minimum(gl.cdiv(length - first, num_programs), ENTRIES)):
            entry = gl.max(gl.where(slot == n, entries, 0), 0)
            if (entry & 1) != 0:
                column = gl.expand_dims((entry >> 1) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
                if CONFIG.of_keys:
                    row, key = column, line
                else:
                    row, key = line, column
                if mask is None:
                    visible = shows(b, row, key, CONFIG, inputs)
                else:
                    at = b.to(gl.int64) * stride_mask_b + row.to(gl.int64) * stride_mask_m + key * stride_mask_n
                    visible = gl.load(mask + at, mask=(row < seqlen_q) & (key < seqlen_k), other=0) != 0
                words = bit_words(offset, first + n * num_programs, part * MMA_M, x, CONFIG.lines)
                gl.store(mask_bits + words, bits_of(visible & (x == 0.0)))  # of every pair


@gluon.jit
def shows(b, row, key, CONFIG: gl.constexpr, inputs):
    """Whether the mask's function shows pairs; of fewer dimensions where it does not depend on all."""
    return CONFIG.score_mod.function(b + inputs.b0, inputs.h0, row + inputs.i0, key + inputs.j0, inputs.captured)[0]
