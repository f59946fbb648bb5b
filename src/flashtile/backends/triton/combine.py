"""What the parts of a split row found, merged by their log-sum-exp: one program for each row."""

import triton.language as tl

from .softmax import INFINITY, LN2, LOG2E
from .tiles import kernel, wide


@kernel
def combine_kernel(
    partial_out, partial_lse, out, lse,
    stride_out_b, stride_out_h, stride_out_m, stride_lse_b, stride_lse_h, stride_lse_split, num_heads_q, total_q,
    DV: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """`partial_lse [SPLITS, ...]` is shaped as lse, `partial_out [SPLITS, ..., Dv]` contiguous with the same rows.
    PARTS is the power of two from SPLITS on, WIDTH that from Dv on.
    """
    row = tl.program_id(0) % total_q
    head = tl.program_id(0) // total_q % num_heads_q
    b = (tl.program_id(0) // total_q // num_heads_q).to(tl.int64)
    at = b * wide(stride_lse_b, 1) + head * wide(stride_lse_h, 1) + row
    part = tl.arange(0, PARTS)
    parts = at + part * wide(stride_lse_split, 1)  # [P]
    lse_p = tl.load(partial_lse + parts, mask=part < SPLITS, other=-INFINITY)
    m = tl.max(lse_p, 0)
    # The maximum drops NaN, the sum does not. Equal infinities have no difference; parts without keys hold 0.
    weights = tl.where(lse_p == m, 1.0, tl.exp2((lse_p - m) * LOG2E))  # [P]
    total = tl.sum(weights, 0)
    d = tl.arange(0, WIDTH)
    inside = (part < SPLITS)[:, None] & (d < DV)[None, :]
    out_p = tl.load(partial_out + parts[:, None] * DV + d[None, :], mask=inside, other=0.0)  # [P, Dv]
    merged = tl.sum(weights[:, None] * out_p, 0) / total
    found = out + b * wide(stride_out_b, 1) + head * wide(stride_out_h, 1) + row * wide(stride_out_m, 1)
    tl.store(found + d, merged.to(out.dtype.element_ty), mask=d < DV)
    tl.store(lse + at, m + tl.log2(total) * LN2)
