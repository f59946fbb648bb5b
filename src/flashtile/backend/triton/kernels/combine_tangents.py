"""Split-KV combine of forward mode: the last split of a tile merges results and tangents by the log-sum-exp.

With weights `w` of the splits that add up to 1, `out`, `dlse` and the sum of `dout` are sums of `w` times those of the
splits; `dout` then lacks `dlse out`. Partial results are merged in the order of the splits, as in `combine`.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import softmax
from .kernel import Pointer, Scalar
from .rows import elements
from .softmax import LN2, LOG2E

REGISTERS = tl.constexpr(64)  # of a thread, for partial results that are loaded at once
MAX_UNROLL = tl.constexpr(8)  # splits that are loaded at once


class TangentPartials(NamedTuple):
    """Results of the splits, with the rows of lse: `[SPLITS, B, H, Sq]`, or `[SPLITS, H, T]` if packed."""

    partial_out: Pointer  # and Dv in each row, as the next one
    partial_dout: Pointer  # sum of p (dv + ds v)
    partial_lse: Pointer
    partial_dlse: Pointer
    partial_residual: Pointer
    semaphores: Pointer  # one a tile, 0 before and after
    stride_split: Scalar


@triton.jit
def combine_splits(partials, out, dout, lse, dlse, residual, b, work, CONFIG: tl.constexpr):
    """Merge the rows of a tile."""
    SPLITS: tl.constexpr = CONFIG.SPLITS
    DV: tl.constexpr = CONFIG.HEAD_DIM_V.WIDTH
    WIDTH: tl.constexpr = triton.next_power_of_2(DV)
    UNROLL: tl.constexpr = min(SPLITS, MAX_UNROLL)
    ELEMENTS: tl.constexpr = 32 * CONFIG.NUM_WARPS * max(4, REGISTERS // (2 * triton.next_power_of_2(UNROLL)))
    ROWS: tl.constexpr = min(CONFIG.BLOCK_M, max(1, ELEMENTS // WIDTH))
    out_head = out.data + b * elements(out.stride_b, CONFIG.ALIGN) + work.head * elements(out.stride_h, CONFIG.ALIGN)
    dout_head = (
        dout.data + b * elements(dout.stride_b, CONFIG.ALIGN) + work.head * elements(dout.stride_h, CONFIG.ALIGN)
    )
    stride_out_m, stride_dout_m = elements(out.stride_m, CONFIG.ALIGN), elements(dout.stride_m, CONFIG.ALIGN)
    lse_head = b * elements(lse.stride_b, 1) + work.head * elements(lse.stride_h, 1) + work.offset
    stride_split = elements(partials.stride_split, 1)
    d = tl.arange(0, WIDTH)[None, :]
    for n in range(0, tl.minimum(work.seqlen - work.start, CONFIG.BLOCK_M), ROWS):
        position = work.start + n + tl.arange(0, ROWS)[:, None]  # [R, 1]
        exists = position < work.seqlen
        loads = exists & (d < DV)
        lse_row = lse_head + position
        m = tl.full([ROWS, 1], -float("inf"), tl.float32)
        for split in tl.range(0, SPLITS, loop_unroll_factor=UNROLL):
            x = tl.load(partials.partial_lse + (lse_row + split * stride_split), exists, 0.0, cache_modifier=".cg")
            m = tl.maximum(m, x)
        total, along = tl.zeros([ROWS, 1], tl.float32), tl.zeros([ROWS, 1], tl.float32)
        merged, moved = tl.zeros([ROWS, WIDTH], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        for split in tl.range(0, SPLITS, loop_unroll_factor=UNROLL):
            row = lse_row + split * stride_split
            x = tl.load(partials.partial_lse + row, exists, 0.0, cache_modifier=".cg")
            u = tl.load(partials.partial_dlse + row, exists, 0.0, cache_modifier=".cg")
            y = tl.load(partials.partial_out + (row * DV + d), loads, 0.0, cache_modifier=".cg")
            dy = tl.load(partials.partial_dout + (row * DV + d), loads, 0.0, cache_modifier=".cg")
            # The maximum drops NaN, the sum does not. Equal infinities have no difference; splits without keys hold 0.
            if CONFIG.NATURAL:
                r = tl.load(partials.partial_residual + row, exists, 0.0, cache_modifier=".cg")
                weight = tl.exp2((tl.where(x == m, 0.0, x - m) + r) * LOG2E)
            else:
                weight = tl.where(x == m, 1.0, tl.exp2((x - m) * LOG2E))
            total += weight
            along += weight * u
            merged += weight * y
            moved += weight * dy
        row_dlse, out_rows = along / total, merged / total
        dout_rows = moved / total - row_dlse * out_rows
        token = work.offset + position
        tl.store(out_head + token * stride_out_m + d, out_rows.to(out.data.dtype.element_ty), mask=loads)
        tl.store(dout_head + token * stride_dout_m + d, dout_rows.to(dout.data.dtype.element_ty), mask=loads)
        row_lse = m + tl.log2(total) * LN2
        tl.store(lse.data + lse_row, row_lse, mask=exists)
        tl.store(dlse + lse_row, row_dlse, mask=exists)
        if CONFIG.NATURAL:
            tl.store(residual + lse_row, softmax.residual(m, total, row_lse), mask=exists)
