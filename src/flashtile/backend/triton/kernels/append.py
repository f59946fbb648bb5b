"""New tokens of a KV cache in one launch: rotate queries and keys, write keys and values into the cache."""

import triton
import triton.language as tl

from .tiles import elements, kernel, work_tile


@kernel
def append_kernel(
    q, rotated_q, k_cache, v_cache, new_k, new_v, cos, sin, lengths, totals, page_table, cu_seqlens_q,
    stride_q_b, stride_q_h, stride_q_m, stride_rotated_q_b, stride_rotated_q_h, stride_rotated_q_m,
    stride_page_k, stride_slot_k, stride_head_k, stride_page_v, stride_slot_v, stride_head_v,
    stride_new_k_b, stride_new_k_h, stride_new_k_m, stride_new_v_b, stride_new_v_h, stride_new_v_m,
    stride_cos, stride_sin, stride_table_b, num_tiles, batch, num_heads_q, num_heads_k, total_q, queries, appended,
    page_size, num_pages, num_columns, rotary_positions,
    D: tl.constexpr, WIDTH: tl.constexpr, DV: tl.constexpr, WIDTH_V: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """One program for each token and head: first the query heads, then the key heads. `lengths` are those before the
    call, `totals`, written here, those after it; HALF the rotated pairs (0: none). Dense: each sequence has `queries`
    and `appended` tokens, `total_q` is the larger. Packed: its queries and new keys are as many. What has no place in
    the cache is not written.
    """
    heads = num_heads_q + num_heads_k
    work = work_tile(tl.program_id(0), num_tiles, heads, cu_seqlens_q, batch, total_q, 0, 1, 1, BLOCK_B)
    b = work.sequence.to(tl.int64)
    if work.sequence < batch:
        place = work.start
        held = tl.maximum(tl.load(lengths + b).to(tl.int32), 0)
        if cu_seqlens_q is not None:
            queries = work.seqlen
            appended = queries if new_k is not None else 0
        if totals is not None:
            total = tl.load(lengths + b) + appended
            tl.store(totals + b, total.to(totals.dtype.element_ty), mask=(work.head == 0) & (place == 0))
        token = work.offset + place
        d = tl.arange(0, WIDTH)
        if work.head < num_heads_q:
            if rotated_q is not None:
                exists = place < queries
                x = (
                    q
                    + b * elements(stride_q_b, 1)
                    + work.head * elements(stride_q_h, 1)
                    + token * elements(stride_q_m, 1)
                )
                position = held + appended - queries + place  # the queries are the last tokens of their sequence
                y = rotate(
                    x, d, exists, position, cos, sin, stride_cos, stride_sin, rotary_positions, D, HALF, INTERLEAVED
                )
                found = rotated_q + b * elements(stride_rotated_q_b, 1) + work.head * elements(stride_rotated_q_h, 1)
                tl.store(found + token * elements(stride_rotated_q_m, 1) + d, y, mask=d < tl.where(exists, D, 0))
        elif new_k is not None:
            head = work.head - num_heads_q
            position = held + place
            column = position // page_size
            nearest = tl.minimum(column, num_columns - 1)
            page = tl.load(page_table + b * elements(stride_table_b, 1) + nearest).to(tl.int64)
            exists = (place < appended) & (column < num_columns) & (page >= 0) & (page < num_pages)
            slot = position % page_size
            x = (
                new_k
                + b * elements(stride_new_k_b, 1)
                + head * elements(stride_new_k_h, 1)
                + token * elements(stride_new_k_m, 1)
            )
            y = rotate(x, d, exists, position, cos, sin, stride_cos, stride_sin, rotary_positions, D, HALF, INTERLEAVED)
            found = k_cache + page * elements(stride_page_k, 1) + slot * elements(stride_slot_k, 1)
            tl.store(found + head * elements(stride_head_k, 1) + d, y, mask=d < tl.where(exists, D, 0))
            dv = tl.arange(0, WIDTH_V)
            x = (
                new_v
                + b * elements(stride_new_v_b, 1)
                + head * elements(stride_new_v_h, 1)
                + token * elements(stride_new_v_m, 1)
            )
            found = v_cache + page * elements(stride_page_v, 1) + slot * elements(stride_slot_v, 1)
            values = tl.load(x + dv, mask=dv < tl.where(exists, DV, 0))
            tl.store(found + head * elements(stride_head_v, 1) + dv, values, mask=dv < tl.where(exists, DV, 0))


@triton.jit
def rotate(
    x, d, exists, position, cos, sin, stride_cos, stride_sin, rotary_positions, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The features `d` of a token, the first `2 * HALF` rotated by its position's angles (Su et al., "RoFormer", section
    3.2.2): pairs (0, 1), (2, 3), ... if INTERLEAVED, else feature n with n + HALF.
    """
    given = tl.load(x + d, mask=d < tl.where(exists, D, 0), other=0.0)
    if HALF == 0:
        return given
    else:
        turning = d < tl.where(exists, 2 * HALF, 0)
        if INTERLEAVED:
            angle, other, first = d // 2, d ^ 1, d % 2 == 0
        else:
            angle, first = d % HALF, d < HALF
            other = tl.where(first, d + HALF, d - HALF)
        row = tl.minimum(tl.maximum(position, 0), rotary_positions - 1)
        c = tl.load(cos + row * elements(stride_cos, 1) + angle, mask=turning, other=1.0).to(tl.float32)
        s = tl.load(sin + row * elements(stride_sin, 1) + angle, mask=turning, other=0.0).to(tl.float32)
        partner = tl.load(x + other, mask=turning, other=0.0).to(tl.float32)
        y = given.to(tl.float32) * c + tl.where(first, -partner, partner) * s
        return tl.where(turning, y.to(given.dtype), given)
