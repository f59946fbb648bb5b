"""Row statistics of the backward pass, computed before its kernels run: negated lse and delta."""

import triton.language as tl

from .. import tile_config
from .shared.compat import Pointer, Scalar, triton_kernel
from .shared.dependent import launch_dependents, wait_prerequisites
from .shared.padded_rows import HeadTensor, RowTensor, block_rows, feature_mask, stride64
from .shared.softmax import INFINITY, LOG2E

NUM_WARPGROUPS = tl.constexpr(tile_config.NUM_WARPGROUPS)  # of a block of rows, each with a dq semaphore
COLUMNS = tl.constexpr(16)  # of the sums of dq that one store clears


@triton_kernel
def preprocess_kernel(
    out: RowTensor, dout: RowTensor, lse: HeadTensor, residual: Pointer, dlse: RowTensor, neg_lse: Pointer,
    neg_residual: Pointer, neg_delta: Pointer, dq_accum: Pointer, dq_semaphore: Pointer, tile_count_semaphore: Pointer,
    tile_count_semaphore_2: Pointer, tile_count_semaphore_3: Pointer, cu_seqlens_q: Pointer, num_tiles: Scalar,
    num_heads: Scalar, seqlen_q: Scalar, batch: Scalar, columns: Scalar, dq_parts: Scalar,
    HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`neg_lse = -lse * log2(e)` and `neg_delta = dlse - sum(dout * out)`; resets the semaphores and dq's sums. Of
    natural scores, `neg_lse = -lse` and `neg_residual = -residual * log2(e)`; a residual that is not given is 0.

    Padding and rows without visible keys get -inf, which makes their probabilities 0, and a delta of 0.
    """
    launch_dependents()
    block, flat_head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    b, head = (flat_head // num_heads).to(tl.int64), flat_head % num_heads
    row, exists = block_rows(block, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
    x = out.data + b * stride64(out.stride_b, ALIGN) + head * stride64(out.stride_h, ALIGN)
    dx = dout.data + b * stride64(dout.stride_b, ALIGN) + head * stride64(dout.stride_h, ALIGN)
    neg_delta_i = tl.zeros([BLOCK_M], tl.float32)
    for c in tl.static_range(len(HEAD_DIM.chunks)):
        feature = HEAD_DIM.offsets[c] + tl.arange(0, HEAD_DIM.chunks[c])[None, :]
        mask = feature_mask(exists, feature, columns, ALIGN)
        out_i = tl.load(x + row[:, None] * stride64(out.stride_m, ALIGN) + feature, mask=mask, other=0.0)
        dout_i = tl.load(dx + row[:, None] * stride64(dout.stride_m, ALIGN) + feature, mask=mask, other=0.0)
        neg_delta_i -= tl.sum(out_i.to(tl.float32) * dout_i.to(tl.float32), 1)
    lse_row = lse.data + b * stride64(lse.stride_b, 1) + head * stride64(lse.stride_h, 1)
    lse_i = tl.load(lse_row + row, mask=exists, other=-INFINITY)
    if dlse.data is not None:
        dlse_row = dlse.data + b * stride64(dlse.stride_b, 1) + head * stride64(dlse.stride_h, 1)
        neg_delta_i += tl.load(dlse_row + row * stride64(dlse.stride_m, 1), mask=exists, other=0.0).to(tl.float32)
    no_keys = lse_i == -INFINITY
    offset = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    if neg_residual is not None:
        tl.store(neg_lse + offset, tl.where(no_keys, -INFINITY, -lse_i))
        residual_i = tl.zeros([BLOCK_M], tl.float32)
        if residual is not None:
            residual_row = residual + b * stride64(lse.stride_b, 1) + head * stride64(lse.stride_h, 1)
            residual_i = tl.load(residual_row + row, mask=exists, other=0.0)
        tl.store(neg_residual + offset, residual_i * -LOG2E)
    else:
        tl.store(neg_lse + offset, tl.where(no_keys, -INFINITY, -LOG2E * lse_i))
    tl.store(neg_delta + offset, tl.where(no_keys, 0.0, neg_delta_i))
    if tl.program_id(0) == 0:
        tl.store(tile_count_semaphore, 0)
        if tile_count_semaphore_2 is not None:
            tl.store(tile_count_semaphore_2, 0)
        if tile_count_semaphore_3 is not None:
            tl.store(tile_count_semaphore_3, 0)
    if dq_accum is not None:
        WIDTH: tl.constexpr = HEAD_DIM.width
        first = dq_accum + tl.program_id(0).to(tl.int64) * (BLOCK_M * WIDTH)
        for column in tl.static_range(0, WIDTH, COLUMNS):
            zeros = tl.zeros([BLOCK_M * COLUMNS], tl.float32)
            tl.store(first + column * BLOCK_M + tl.arange(0, BLOCK_M * COLUMNS), zeros)
    if dq_semaphore is not None:
        for part in range(dq_parts):
            semaphore = dq_semaphore + (part * tl.num_programs(0) + tl.program_id(0)) * NUM_WARPGROUPS
            tl.store(semaphore + tl.arange(0, NUM_WARPGROUPS), 0)
    wait_prerequisites()
