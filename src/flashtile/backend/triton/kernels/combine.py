"""What the parts of a split row found, merged by their log-sum-exp by the last part of a tile that is done.

The order of the parts is that of their row_stats, whichever is last: the same call gives the same bits.
"""

import triton
import triton.language as tl

from .softmax import LN2, LOG2E

ELEMENTS = tl.constexpr(512)  # of the result that are formed at once
MAX_UNROLL = tl.constexpr(16)  # parts that are read at once


@triton.jit
def is_last_split(semaphores, SPLITS: tl.constexpr):
    """Whether the other programs of a tile have stored what they found; this one has. The last sets the tile's counter
    to zero again, for the next launch.
    """
    tl.debug_barrier()  # one thread counts, after all have stored
    last = tl.atomic_add(semaphores, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(semaphores, 0)
    return last


@triton.jit
def combine_splits(
    partial_out, partial_lse, out, lse, work, first, stride_out_h, stride_out_m, stride_lse_h, stride_split,
    PACK_GQA: tl.constexpr, DV: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Merge the rows of a tile. `out` is that of the sequence, `first` where it begins in lse. `partial_lse
    [SPLITS, ...]` has rows as lse, `partial_out` the same and DV numbers in each, of which WIDTH is the power of two.
    """
    AT_ONCE: tl.constexpr = min(SPLITS, MAX_UNROLL)
    ROWS: tl.constexpr = min(BLOCK_M, max(1, ELEMENTS // WIDTH))
    d = tl.arange(0, WIDTH)[None, :]
    for n in range(0, tl.minimum(work.seqlen * PACK_GQA - work.start, BLOCK_M), ROWS):
        row = work.start + n + tl.arange(0, ROWS)[:, None]
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [R, 1]
        exists = position < work.seqlen
        at = first + head * stride_lse_h + position
        # Other cores wrote these: they are read from the cache that all share.
        m = tl.full([ROWS, 1], -float("inf"), tl.float32)
        for p in tl.range(0, SPLITS, loop_unroll_factor=AT_ONCE):
            x = tl.load(partial_lse + (at + p * stride_split), mask=exists, other=0.0, cache_modifier=".cg")
            m = tl.maximum(m, x)
        total, merged = tl.zeros([ROWS, 1], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for p in tl.range(0, SPLITS, loop_unroll_factor=AT_ONCE):
            part = at + p * stride_split
            x = tl.load(partial_lse + part, mask=exists, other=0.0, cache_modifier=".cg")
            y = tl.load(partial_out + part * DV + d, mask=exists & (d < DV), other=0.0, cache_modifier=".cg")
            # The maximum drops NaN, the sum does not. Equal infinities have no difference; parts without keys hold 0.
            weight = tl.where(x == m, 1.0, tl.exp2((x - m) * LOG2E))
            total += weight
            merged += weight * y
        found = out + head * stride_out_h + (work.offset + position) * stride_out_m
        tl.store(found + d, (merged / total).to(out.dtype.element_ty), mask=exists & (d < DV))
        tl.store(lse + at, m + tl.log2(total) * LN2, mask=exists)
