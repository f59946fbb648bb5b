"""The parameters of the kernels: tensors with their strides, sequence lengths, features.

Every field of a NamedTuple may be `None`: absent, and compiled away.
"""

from typing import NamedTuple

import triton.language as tl

from .kernel import Captured, Pointer, Scalar


class QueryTensor(NamedTuple):
    """`[B, H, Sq, D]`, or packed `[T, H, D]`, where `stride_b` is 0. Features are contiguous."""

    data: Pointer
    stride_b: Scalar  # strides in units of ALIGN elements
    stride_h: Scalar
    stride_m: Scalar


class KeyTensor(NamedTuple):
    """`[B, Hkv, Sk, D]`, packed `[T, Hkv, D]`, or pages, where `stride_b` is from page to page."""

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar
    stride_n: Scalar


class ScaleTensor(NamedTuple):
    """Scales of keys of 8 bits, fp32 `[B|1, num_pages|1, page_size|1, Hkv]`; stride 0 of what is not told apart."""

    data: Pointer
    stride_b: Scalar
    stride_p: Scalar
    stride_n: Scalar
    stride_h: Scalar


class RowScaleTensor(NamedTuple):
    """Scales of queries of 8 bits, fp32 `[B|1, Hq or Hkv, rows|1]`; stride 0 of what is not told apart."""

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar  # from query head to query head
    stride_g: Scalar  # from key head to key head
    stride_m: Scalar


class RowTensor(NamedTuple):
    """One value a row, contiguous: `[B, H, Sq]` or `[H, T]`."""

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar


class PairTensor(NamedTuple):
    """A mask or bias `[B, H, Sq, Sk]`. A broadcast row or column has no stride, a broadcast sequence or head 0; that of
    keys is 1.
    """

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar
    stride_m: Scalar
    stride_n: Scalar


class BatchTensor(NamedTuple):
    """A page table `[B, columns]` or slopes `[B, H]`."""

    data: Pointer
    stride_b: Scalar


class Lengths(NamedTuple):
    """Sequences. `total_q` and `total_k` are tokens, or positions of a dense sequence."""

    cu_seqlens_q: Pointer
    cu_seqlens_k: Pointer
    seqused_q: Pointer
    seqused_k: Pointer
    page_table: BatchTensor
    leftpad_k: Pointer
    num_tiles: Scalar  # blocks of rows: of a dense sequence, or of all packed ones
    batch: Scalar
    num_heads_q: Scalar
    num_heads_k: Scalar
    total_q: Scalar
    total_k: Scalar
    max_seqlen_k: Scalar
    pair_rows: Scalar  # rows of mask and bias
    num_pages: Scalar


class WindowSize(NamedTuple):
    """Keys that a row sees to its left and right; `None` where unlimited."""

    window_left: Scalar
    window_right: Scalar
    top_left: Scalar  # shift of the bound `j <= i + shift` of top-left causal
    attention_chunk: Scalar  # positions that see each other only
    chunk_origin: Scalar  # position of the first key, in an unsharded call 0
    diagonal: Scalar  # added to seqlen_k - seqlen_q


class ScoreInputs(NamedTuple):
    """Scores: `multiplier` makes them of products, `factor` makes base-2 logarithms of them."""

    mask: PairTensor
    bias: PairTensor
    slopes: BatchTensor
    sinks: Pointer
    factor: Scalar
    multiplier: Scalar  # `None` where the softmax takes the scale
    pair_align: tl.constexpr  # the unit of strides of mask and bias, in elements
    softcap: Scalar
    score_mod: tl.constexpr  # a device function, one for each formula
    mask_mod: tl.constexpr
    captured: Captured


class DropoutInputs(NamedTuple):
    """Dropout and the position of this call's part in the whole call."""

    seed: Pointer
    i0: Scalar
    j0: Scalar
    b0: Scalar
    h0: Scalar
    num_heads: Scalar  # of the whole call
    threshold: Scalar  # `None` without dropout
    keep_scale: Scalar


class BlockLists(NamedTuple):
    """Blocks to visit by the mask function, int32 `[B, H, lists, 2 + entries]`: how many are partly visible and how
    many full, then those that are partly visible, and then the full ones. A shared sequence or head has stride 0.
    """

    data: Pointer
    stride_b: Scalar
    stride_h: Scalar
    stride_m: Scalar


class Params(NamedTuple):
    """Sequences and features of a call."""

    lengths: Lengths
    window: WindowSize
    dropout: DropoutInputs
    scores: ScoreInputs
    lists: BlockLists  # with them, every block in the window is visited or not by its list
