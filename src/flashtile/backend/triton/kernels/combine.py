"""Split-KV combine: the last split of a tile to finish merges all partial results by their log-sum-exp.

Partial results are merged in the order of the splits: the same call gives the same bits.
"""

import triton
import triton.language as tl

from . import softmax
from .rows import elements
from .softmax import LN2, LOG2E

REGISTERS = tl.constexpr(64)  # of a thread, for partial results that are loaded at once
MAX_UNROLL = tl.constexpr(16)  # splits that are loaded at once


@triton.jit
def is_last_split(semaphore, splits):
    """Count this split as finished; whether all others are. The last one resets the semaphore for the next launch."""
    tl.debug_barrier()  # all threads have stored before one counts
    last = tl.atomic_add(semaphore, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(semaphore, 0)
    return last


@triton.jit
def combine_splits(partials, out, lse, residual, b, work, CONFIG: tl.constexpr):
    """Merge the rows of a tile."""
    PACK_GQA: tl.constexpr = CONFIG.PACK_GQA
    SPLITS: tl.constexpr = CONFIG.SPLITS
    DV: tl.constexpr = CONFIG.HEAD_DIM_V.WIDTH
    WIDTH: tl.constexpr = triton.next_power_of_2(DV)
    UNROLL: tl.constexpr = min(SPLITS, MAX_UNROLL)
    ELEMENTS: tl.constexpr = 32 * CONFIG.NUM_WARPS * max(4, REGISTERS // triton.next_power_of_2(UNROLL))
    ROWS: tl.constexpr = min(CONFIG.BLOCK_M, max(1, ELEMENTS // WIDTH))
    out_b = out.data + b * elements(out.stride_b, CONFIG.ALIGN)
    lse_b = b * elements(lse.stride_b, 1) + work.offset
    stride_out_h, stride_out_m = elements(out.stride_h, CONFIG.ALIGN), elements(out.stride_m, CONFIG.ALIGN)
    stride_lse_h, stride_split = elements(lse.stride_h, 1), elements(partials.stride_split, 1)
    d = tl.arange(0, WIDTH)[None, :]
    for n in range(0, tl.minimum(work.seqlen * PACK_GQA - work.start, CONFIG.BLOCK_M), ROWS):
        row = work.start + n + tl.arange(0, ROWS)[:, None]
        position, head = row // PACK_GQA, work.head * PACK_GQA + row % PACK_GQA  # [R, 1]
        exists = position < work.seqlen
        lse_row = lse_b + head * stride_lse_h + position
        # Other cores wrote these: load them from the L2 cache, which all cores share.
        m = tl.full([ROWS, 1], -float("inf"), tl.float32)
        for split in tl.range(0, SPLITS, loop_unroll_factor=UNROLL):
            partial_lse = partials.partial_lse + (lse_row + split * stride_split)
            x = tl.load(partial_lse, mask=exists, other=0.0, cache_modifier=".cg")
            m = tl.maximum(m, x)
        total, merged = tl.zeros([ROWS, 1], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for split in tl.range(0, SPLITS, loop_unroll_factor=UNROLL):
            partial_row = lse_row + split * stride_split
            x = tl.load(partials.partial_lse + partial_row, mask=exists, other=0.0, cache_modifier=".cg")
            partial_out = partials.partial_out + partial_row * DV + d
            y = tl.load(partial_out, mask=exists & (d < DV), other=0.0, cache_modifier=".cg")
            # The maximum drops NaN, the sum does not. Equal infinities have no difference; splits without keys hold 0.
            if CONFIG.NATURAL:
                r = tl.load(partials.partial_residual + partial_row, mask=exists, other=0.0, cache_modifier=".cg")
                weight = tl.exp2((tl.where(x == m, 0.0, x - m) + r) * LOG2E)
            else:
                weight = tl.where(x == m, 1.0, tl.exp2((x - m) * LOG2E))
            total += weight
            merged += weight * y
        out_rows = out_b + head * stride_out_h + (work.offset + position) * stride_out_m
        tl.store(out_rows + d, (merged / total).to(out.data.dtype.element_ty), mask=exists & (d < DV))
        row_lse = m + tl.log2(total) * LN2
        tl.store(lse.data + lse_row, row_lse, mask=exists)
        if CONFIG.NATURAL:
            tl.store(residual + lse_row, softmax.residual(m, total, row_lse), mask=exists)
