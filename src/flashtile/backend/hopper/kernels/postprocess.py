"""Conversion of dq from fp32 accumulators to the input's dtype, after the fused backward kernel."""

import triton
import triton.language as tl

from .. import tile_config
from .shared.compat import Pointer, Scalar, triton_kernel
from .shared.dependent import wait_prerequisites
from .shared.padded_rows import RowTensor, block_rows, feature_mask, stride64

NUM_WARPGROUPS = tl.constexpr(tile_config.NUM_WARPGROUPS)  # of a block of rows, each with a dq semaphore


@triton_kernel
def postprocess_kernel(
    dq_accum: Pointer, dq_semaphore: Pointer, dq: RowTensor, cu_seqlens_q: Pointer, num_tiles: Scalar,
    num_heads: Scalar, seqlen_q: Scalar, batch: Scalar, scale: Scalar, columns: Scalar, dq_parts: Scalar,
    HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr, DQ_BOX: tl.constexpr, DQ_SHARE: tl.constexpr,
):  # fmt: skip
    """dq from its accumulators, added in their order. A dq semaphore of 0 means that nothing was written."""
    block, flat_head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    b, head = (flat_head // num_heads).to(tl.int64), flat_head % num_heads
    row, exists = block_rows(block, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
    wait_prerequisites()
    program, stride_part = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for c in tl.static_range(len(HEAD_DIM.chunks)):
        feature = HEAD_DIM.offsets[c] + tl.arange(0, HEAD_DIM.chunks[c])[None, :]
        offset = tl.arange(0, BLOCK_M)[:, None] * HEAD_DIM.width + feature
        dq_i = accumulated(dq_accum, dq_semaphore, program, offset, HEAD_DIM.width)
        for part in range(1, dq_parts):
            dq_i += accumulated(dq_accum, dq_semaphore, program + part * stride_part, offset, HEAD_DIM.width)
        dq_i = unswizzled(dq_i, BLOCK_M, HEAD_DIM.chunks[c], DQ_BOX, DQ_SHARE)
        x = dq.data + b * stride64(dq.stride_b, ALIGN) + head * stride64(dq.stride_h, ALIGN)
        offset = row[:, None] * stride64(dq.stride_m, ALIGN) + feature
        dq_i = (dq_i * scale).to(dq.data.dtype.element_ty)
        tl.store(x + offset, dq_i, mask=feature_mask(exists, feature, columns, ALIGN))


@triton.jit
def accumulated(dq_accum, dq_semaphore, block, offset, WIDTH: tl.constexpr):
    """One accumulator of a block of rows, at `offset [M, D]`."""
    dq_i = dq_accum + block * (offset.shape[0] * WIDTH) + offset
    if dq_semaphore is None:  # the sums began with zeros
        return tl.load(dq_i)
    else:
        writers = tl.load(dq_semaphore + block * NUM_WARPGROUPS)
        written = tl.where(offset >= 0, writers, 0) > 0  # the scalar as a mask of this shape
        return tl.load(dq_i, mask=written, other=0.0)


@triton.jit
def unswizzled(x, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, DQ_BOX: tl.constexpr, DQ_SHARE: tl.constexpr):
    """Undo `swizzle.swizzled` in each block of 64 rows and of a share's columns, or fewer where a chunk has no more."""
    R: tl.constexpr = BLOCK_M // 64
    COLUMNS: tl.constexpr = min(WIDTH, DQ_SHARE)
    C: tl.constexpr = WIDTH // COLUMNS
    if DQ_BOX == 16:
        r_w_g2_h_g0_c_j2_t_j1_e = tl.reshape(x, [R, 4, 4, 2, 2, C, COLUMNS // 16, 4, 2, 2])
        x = tl.permute(r_w_g2_h_g0_c_j2_t_j1_e, [0, 1, 3, 2, 4, 5, 6, 8, 7, 9])
        return tl.reshape(x, [BLOCK_M, WIDTH])
    if COLUMNS == 32:
        r_w_g2_j2_h_c_g0_t_j1_e = tl.reshape(x, [R, 4, 4, 2, 2, C, 2, 4, 2, 2])
        return tl.reshape(tl.permute(r_w_g2_j2_h_c_g0_t_j1_e, [0, 1, 4, 2, 6, 5, 3, 8, 7, 9]), [BLOCK_M, WIDTH])
    r_w_g2_j2_c_h_g0_t_j1_e = tl.reshape(x, [R, 4, 4, COLUMNS // 16, C, 2, 2, 4, 2, 2])
    return tl.reshape(tl.permute(r_w_g2_j2_c_h_g0_t_j1_e, [0, 1, 5, 2, 6, 4, 3, 8, 7, 9]), [BLOCK_M, WIDTH])
