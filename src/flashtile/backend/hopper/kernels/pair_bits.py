"""Kernel that finds which pairs of partly visible blocks a mask shows, as bits (`shared.block_lists`), once for
all heads.
"""

from triton.experimental.gluon import language as gl

from .shared.block_lists import bit_words
from .shared.column_masks import bits_of
from .shared.compat import kernel
from .shared.mma import MMA_M


@kernel
def pair_bits_kernel(
    lists, mask_bits, mask, stride_mask_b, stride_mask_m, stride_mask_n, stride_lists, num_tiles, num_programs,
    seqlen_q, seqlen_k, CONFIG: gl.constexpr, inputs,
):  # fmt: skip
    """Store the bits of MMA_M lines of a tile, of every entry number `num_programs` of its list. Lines are rows, and
    columns keys, or with CONFIG.of_keys the other way round. The mask is a tensor or a function.
    """
    COLUMNS: gl.constexpr = CONFIG.columns
    PARTS: gl.constexpr = CONFIG.lines // MMA_M
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    part, program = gl.program_id(0) % PARTS, gl.program_id(0) // PARTS
    first, number = program % num_programs, program // num_programs
    b, tile = number // num_tiles, number % num_tiles
    x = gl.zeros([MMA_M, COLUMNS], gl.float32, layout)
    line = gl.expand_dims(tile * CONFIG.lines + part * MMA_M + gl.arange(0, MMA_M, gl.SliceLayout(1, layout)), 1)
    offset = number * stride_lists
    for position in range(first, gl.load(lists + offset), num_programs):
        entry = gl.load(lists + (offset + 1 + position))
        if (entry & 1) != 0:
            column = gl.expand_dims((entry >> 1) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
            if CONFIG.of_keys:
                row, key = column, line
            else:
                row, key = line, column
            if mask is None:
                visible = CONFIG.score_mod.function(
                    b + inputs.b0, inputs.h0, row + inputs.i0, key + inputs.j0, inputs.captured
                )[0]  # fmt: skip
            else:
                at = b.to(gl.int64) * stride_mask_b + row.to(gl.int64) * stride_mask_m + key * stride_mask_n
                visible = gl.load(mask + at, mask=(row < seqlen_q) & (key < seqlen_k), other=0) != 0
            bits = bits_of(visible & (x == 0.0))  # of every pair
            gl.store(mask_bits + bit_words(offset, position, part * MMA_M, x, CONFIG.lines), bits)
