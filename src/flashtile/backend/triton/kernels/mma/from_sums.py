"""dq from the sums to which the programs of `backward` add."""

import triton
import triton.language as tl

from ..kernel import Pointer, Scalar, kernel
from ..parameters import QueryTensor, RowTensor
from ..prologue import sequence_index
from ..rows import elements, head_pointer, store_chunk
from ..sequences import work_tile


@kernel
def from_sums_kernel(
    sums: RowTensor, dq: QueryTensor, cu_seqlens_q: Pointer, seqused_q: Pointer, num_tiles: Scalar, batch: Scalar,
    num_heads_q: Scalar, total_q: Scalar, scale: Scalar, CONFIG: tl.constexpr,
):  # fmt: skip
    """Store `dq`, scaled. The blocks of rows are those of `backward`."""
    M: tl.constexpr = CONFIG.BLOCK_M
    D: tl.constexpr = CONFIG.HEAD_DIM
    index = tl.arange(0, CONFIG.BLOCK_B)
    work = work_tile(
        tl.program_id(0), num_tiles, num_heads_q, cu_seqlens_q, seqused_q, batch, total_q, 0, 1, M, index
    )  # fmt: skip
    if work.start < work.seqlen:
        b = sequence_index(work.sequence, batch)
        row = work.start + tl.arange(0, M)
        first = head_pointer(sums, b, work.head, 8)
        first += (first_row(work.offset, work.sequence, cu_seqlens_q, M) + work.start) * (D.CHUNK_0 + D.CHUNK_1)
        dq_head = head_pointer(dq, b, work.head, CONFIG.ALIGN)
        to = dq_head + (work.offset + row)[:, None] * elements(dq.stride_m, CONFIG.ALIGN)
        store_chunk(to, load_sums(first, 0, D.CHUNK_0, D, M) * scale, row < work.seqlen, 0, D.CHUNK_0, D.WIDTH)
        if D.CHUNK_1 > 0:
            found = load_sums(first, D.CHUNK_0, D.CHUNK_1, D, M) * scale
            store_chunk(to, found, row < work.seqlen, D.CHUNK_0, D.CHUNK_1, D.WIDTH)


@triton.jit
def first_row(offset, sequence, cu_seqlens, M: tl.constexpr):
    """Where a sequence's sums begin: each packed sequence has whole blocks of rows."""
    if cu_seqlens is None:
        return 0
    else:
        return (offset // M + sequence).to(tl.int64) * M


@triton.jit
def load_sums(first, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    """Sums of so many features `[M, WIDTH]`: of eight rows and eight features, those at even ones come first, as the
    lanes of a warp hold them.
    """
    row, d = tl.arange(0, M)[:, None], tl.arange(0, WIDTH)[None, :]
    eights = row // 8 * (8 * (D.CHUNK_0 + D.CHUNK_1)) + 8 * FIRST + d // 8 * 64
    return tl.load(first + eights + d % 2 * 32 + row % 8 * 4 + d % 8 // 2)
