"""New tokens of a KV cache in one launch: rotate queries and keys, write keys and values into the cache."""

from typing import NamedTuple

import triton
import triton.language as tl

from .eight_bit import quantized, scale_of_token
from .kernel import Pointer, Scalar, kernel
from .parameters import BatchTensor, QueryTensor, ScaleTensor
from .rows import elements, head_pointer
from .sequences import query_tile


class CacheTensor(NamedTuple):
    """A paged cache `[pages, page_size, Hkv, D]`; strides are in elements."""

    data: Pointer
    stride_page: Scalar
    stride_slot: Scalar
    stride_h: Scalar


class Rotary(NamedTuple):
    """Cosines and sines, `[positions, rotary_dim / 2]`."""

    cos: Pointer
    sin: Pointer
    rotary_start: Pointer  # of each sequence's first query and first new key, if not by their places
    cos_stride: Scalar
    sin_stride: Scalar
    rotary_positions: Scalar


class NewTokens(NamedTuple):
    """The tokens of a call. Dense: each sequence has `queries` and `appended` tokens; `total_q` is the larger. Packed:
    a sequence appends as many keys as it has queries.
    """

    cu_seqlens_q: Pointer
    seqused_q: Pointer
    lengths: Pointer  # of the cache before the call
    totals: Pointer  # after it: a result
    num_tiles: Scalar
    batch: Scalar
    num_heads_q: Scalar
    num_heads_k: Scalar
    total_q: Scalar
    queries: Scalar
    appended: Scalar


@kernel
def append_kernel(
    q: QueryTensor, rotated_q: QueryTensor, k_cache: CacheTensor, v_cache: CacheTensor, new_k: QueryTensor,
    new_v: QueryTensor, rotary: Rotary, tokens: NewTokens, page_table: BatchTensor, page_size: Scalar,
    num_pages: Scalar, num_columns: Scalar, k_descale: ScaleTensor, v_descale: ScaleTensor, CONFIG: tl.constexpr,
):  # fmt: skip
    """One program for each token and head: first the query heads, then the key heads. Tokens for which the cache has no
    room are not written.
    """
    K_SCALES: tl.constexpr = CONFIG.K_SCALES
    V_SCALES: tl.constexpr = CONFIG.V_SCALES
    D: tl.constexpr = CONFIG.D
    DV: tl.constexpr = CONFIG.DV
    heads = tokens.num_heads_q + tokens.num_heads_k
    work = query_tile(tokens, tl.program_id(0), heads, 1, 1, tl.arange(0, CONFIG.BLOCK_B))
    b = work.sequence.to(tl.int64)
    if work.sequence < tokens.batch:
        place = work.start
        cached = tl.maximum(tl.load(tokens.lengths + b).to(tl.int32), 0)
        queries, appended = tokens.queries, tokens.appended
        if tokens.cu_seqlens_q is not None:
            queries = work.seqlen
            appended = queries if new_k.data is not None else 0
        if tokens.totals is not None:
            total = tl.load(tokens.lengths + b) + appended
            first = (work.head == 0) & (place == 0)
            tl.store(tokens.totals + b, total.to(tokens.totals.dtype.element_ty), mask=first)
        token = work.offset + place
        d = tl.arange(0, CONFIG.BLOCK_D)
        if work.head < tokens.num_heads_q:
            if rotated_q.data is not None:
                exists = place < queries
                x = head_pointer(q, b, work.head, 1) + token * elements(q.stride_m, 1)
                position = cached + appended - queries  # the queries are the last tokens of their sequence
                if rotary.rotary_start is not None:
                    position = tl.load(rotary.rotary_start + b).to(tl.int32)
                if not CONFIG.Q_FIXED:
                    position += place
                y = rotate(x, d, exists, position, rotary, CONFIG)
                pointer = head_pointer(rotated_q, b, work.head, 1) + token * elements(rotated_q.stride_m, 1)
                tl.store(pointer + d, y, mask=d < tl.where(exists, D, 0))
        elif new_k.data is not None:
            head = work.head - tokens.num_heads_q
            position = cached + place
            column = position // page_size
            pages = page_table.data + b * elements(page_table.stride_b, 1)
            page = tl.load(pages + column, mask=column < num_columns, other=-1).to(tl.int64)
            exists = (place < appended) & (page >= 0) & (page < num_pages)
            slot = position % page_size
            x = head_pointer(new_k, b, head, 1) + token * elements(new_k.stride_m, 1)
            if rotary.rotary_start is not None:
                position = tl.load(rotary.rotary_start + b).to(tl.int32) + place
            y = rotate(x, d, exists, position, rotary, CONFIG)
            if CONFIG.KEY_FORMAT != "":
                y = quantized_token(y, k_descale, b, page, slot, head, exists, K_SCALES, CONFIG)
            tl.store(cache_pointer(k_cache, page, slot, head) + d, y, mask=d < tl.where(exists, D, 0))
            if new_v.data is not None:  # else values are columns of k
                dv = tl.arange(0, CONFIG.BLOCK_DV)
                x = head_pointer(new_v, b, head, 1) + token * elements(new_v.stride_m, 1)
                values = tl.load(x + dv, mask=dv < tl.where(exists, DV, 0), other=0.0)
                if CONFIG.KEY_FORMAT != "":
                    values = quantized_token(values, v_descale, b, page, slot, head, exists, V_SCALES, CONFIG)
                tl.store(cache_pointer(v_cache, page, slot, head) + dv, values, mask=dv < tl.where(exists, DV, 0))


@triton.jit
def quantized_token(x, descale, b, page, slot, head, exists, KIND: tl.constexpr, CONFIG: tl.constexpr):
    """A token's features as 8-bit integers; by a scale of its own, which is stored, if the KIND is "token"."""
    KEY_FORMAT: tl.constexpr = CONFIG.KEY_FORMAT
    scale = 1.0
    if KIND != "":
        pointer = descale.data + b * elements(descale.stride_b, 1) + page * elements(descale.stride_p, 1)
        pointer += slot * elements(descale.stride_n, 1) + head * elements(descale.stride_h, 1)
        if KIND == "token":
            scale = scale_of_token(x, KEY_FORMAT)
            tl.store(pointer, scale, mask=exists)
        else:
            scale = tl.load(pointer, mask=exists, other=1.0)
    return quantized(x, scale, KEY_FORMAT)


@triton.jit
def cache_pointer(cache, page, slot, head):
    """Pointer to the row of a page's slot and head."""
    pointer = cache.data + page * elements(cache.stride_page, 1) + slot * elements(cache.stride_slot, 1)
    return pointer + head * elements(cache.stride_h, 1)


@triton.jit
def rotate(x, d, exists, position, rotary, CONFIG: tl.constexpr):
    """Load features `d` of a token and rotate the first `2 * HALF` by the angles of its position.

    Pairs are (0, 1), (2, 3), ... if INTERLEAVED, else feature n with n + HALF (Su et al., "RoFormer", section 3.2.2).
    """
    HALF: tl.constexpr = CONFIG.HALF
    features = tl.load(x + d, mask=d < tl.where(exists, CONFIG.D, 0), other=0.0)
    if HALF == 0:
        return features
    else:
        rotates = d < tl.where(exists & (rotary.rotary_positions > 0), 2 * HALF, 0)
        if CONFIG.INTERLEAVED:
            angle, other, first = d // 2, d ^ 1, d % 2 == 0
        else:
            angle, first = d % HALF, d < HALF
            other = tl.where(first, d + HALF, d - HALF)
        row = tl.minimum(tl.maximum(position, 0), rotary.rotary_positions - 1)
        c = tl.load(rotary.cos + row * elements(rotary.cos_stride, 1) + angle, mask=rotates, other=1.0).to(tl.float32)
        s = tl.load(rotary.sin + row * elements(rotary.sin_stride, 1) + angle, mask=rotates, other=0.0).to(tl.float32)
        partner = tl.load(x + other, mask=rotates, other=0.0).to(tl.float32)
        y = features.to(tl.float32) * c + tl.where(first, -partner, partner) * s
        return tl.where(rotates, y.to(features.dtype), features)
