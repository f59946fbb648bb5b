"""What the backward pass needs of each row before its kernel runs, and what becomes of the sums that it leaves.

In Triton. Each sequence begins with a block of rows here, so that no block holds rows of two: those past its last one
are padding. The b-th packed one begins with block `cu_seqlens_q[b] // BLOCK_M + b`, which is past all before it.
"""

import triton
import triton.language as tl

from .. import tables
from .shared.compat import triton_kernel
from .shared.softmax import INFINITY, LOG2E

NUM_WARPGROUPS = tl.constexpr(tables.NUM_WARPGROUPS)  # each has its turns


@triton.jit
def stride64(stride, ALIGN: tl.constexpr):
    """A stride in elements, from units of ALIGN elements: offsets are 64-bit, and the compiler sees their alignment."""
    return stride.to(tl.int64) * ALIGN


@triton.jit
def block_rows(block, cu_seqlens_q, batch, seqlen_q, BLOCK_M: tl.constexpr):
    """Where the rows of the n-th block are in a tensor, and which of them exist. `seqlen_q` is the number of tokens
    where sequences are packed; those that belong to none are one more sequence.
    """
    first, stop = block * BLOCK_M, seqlen_q
    if cu_seqlens_q is not None:
        b, above = 0, batch + 1
        while above - b > 1:
            middle = (b + above) // 2
            reached = token_of(cu_seqlens_q, middle, seqlen_q) // BLOCK_M + middle <= block
            b, above = tl.where(reached, middle, b), tl.where(reached, above, middle)
        token = token_of(cu_seqlens_q, b, seqlen_q)
        first = token + (block - token // BLOCK_M - b) * BLOCK_M
        if b < batch:
            stop = token_of(cu_seqlens_q, b + 1, seqlen_q)
    row = first + tl.arange(0, BLOCK_M)
    return row, row < stop


@triton.jit
def token_of(cu_seqlens_q, b, num_tokens):
    return tl.minimum(tl.maximum(tl.load(cu_seqlens_q + b), 0), num_tokens)


@triton_kernel
def preprocess_kernel(
    out, dout, lse, dlse, neg_lse_log2, neg_delta, dq_semaphore, cu_seqlens_q,
    stride_out_b, stride_out_h, stride_out_m, stride_dout_b, stride_dout_h, stride_dout_m,
    stride_lse_b, stride_lse_h, stride_dlse_b, stride_dlse_h, stride_dlse_m,
    num_tiles, num_heads, seqlen_q, batch, HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """`start = -lse`, a base-2 logarithm, and `-delta = dlse - sum(dout * out)`. Padding and rows that saw nothing get
    -inf, so that their probabilities come out as 0, and 0. No block of rows has had a turn yet.
    """
    block, flat_head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    b, head = (flat_head // num_heads).to(tl.int64), flat_head % num_heads
    row, exists = block_rows(block, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
    x = out + b * stride64(stride_out_b, ALIGN) + head * stride64(stride_out_h, ALIGN)
    dx = dout + b * stride64(stride_dout_b, ALIGN) + head * stride64(stride_dout_h, ALIGN)
    neg_delta_i = tl.zeros([BLOCK_M], tl.float32)
    for c in tl.static_range(len(HEAD_DIM.chunks)):
        feature = HEAD_DIM.offsets[c] + tl.arange(0, HEAD_DIM.chunks[c])[None, :]
        out_i = tl.load(x + row[:, None] * stride64(stride_out_m, ALIGN) + feature, mask=exists[:, None], other=0.0)
        dout_i = tl.load(dx + row[:, None] * stride64(stride_dout_m, ALIGN) + feature, mask=exists[:, None], other=0.0)
        neg_delta_i -= tl.sum(out_i.to(tl.float32) * dout_i.to(tl.float32), 1)
    lse_row = lse + b * stride64(stride_lse_b, 1) + head * stride64(stride_lse_h, 1)
    lse_i = tl.load(lse_row + row, mask=exists, other=-INFINITY)
    if dlse is not None:
        dlse_row = dlse + b * stride64(stride_dlse_b, 1) + head * stride64(stride_dlse_h, 1)
        neg_delta_i += tl.load(dlse_row + row * stride64(stride_dlse_m, 1), mask=exists, other=0.0).to(tl.float32)
    no_keys = lse_i == -INFINITY
    offset = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(neg_lse_log2 + offset, tl.where(no_keys, -INFINITY, -LOG2E * lse_i))
    tl.store(neg_delta + offset, tl.where(no_keys, 0.0, neg_delta_i))
    if dq_semaphore is not None:
        tl.store(dq_semaphore + tl.program_id(0) * NUM_WARPGROUPS + tl.arange(0, NUM_WARPGROUPS), 0)


@triton_kernel
def postprocess_kernel(
    dq_accum, dq_semaphore, dq, cu_seqlens_q,
    stride_dq_b, stride_dq_h, stride_dq_m, num_tiles, num_heads, seqlen_q, batch, scale,
    HEAD_DIM: tl.constexpr, ALIGN: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dq from its sums. Nothing has been written for a block of rows whose counter of turns is 0: it sees no key."""
    block, flat_head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    b, head = (flat_head // num_heads).to(tl.int64), flat_head % num_heads
    row, exists = block_rows(block, cu_seqlens_q, batch, seqlen_q, BLOCK_M)
    first = tl.program_id(0).to(tl.int64) * (BLOCK_M * HEAD_DIM.width)
    writers = tl.load(dq_semaphore + tl.program_id(0) * NUM_WARPGROUPS)
    for c in tl.static_range(len(HEAD_DIM.chunks)):
        feature = HEAD_DIM.offsets[c] + tl.arange(0, HEAD_DIM.chunks[c])[None, :]
        offset = first + tl.arange(0, BLOCK_M)[:, None] * HEAD_DIM.width + feature
        written = tl.where(offset >= 0, writers, 0) > 0  # one number as a mask of this shape
        dq_i = unswizzled(tl.load(dq_accum + offset, mask=written, other=0.0), BLOCK_M, HEAD_DIM.chunks[c])
        x = dq + b * stride64(stride_dq_b, ALIGN) + head * stride64(stride_dq_h, ALIGN)
        offset = row[:, None] * stride64(stride_dq_m, ALIGN) + feature
        tl.store(x + offset, (dq_i * scale).to(dq.dtype.element_ty), mask=exists[:, None])


@triton.jit
def unswizzled(x, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Undoes `backward_sums.scrambled` in each square of 64 rows and columns, or where there are 32, in these."""
    R: tl.constexpr = BLOCK_M // 64
    COLUMNS: tl.constexpr = min(WIDTH, 64)
    C: tl.constexpr = WIDTH // COLUMNS
    r_w_g2_j2_c_h_g0_t_j1_e = tl.reshape(x, [R, 4, 4, COLUMNS // 16, C, 2, 2, 4, 2, 2])
    return tl.reshape(tl.permute(r_w_g2_j2_c_h_g0_t_j1_e, [0, 1, 5, 2, 6, 4, 3, 8, 7, 9]), [BLOCK_M, WIDTH])
