"""Bias and mask: tensors with a value for each pair, read in the layout of scores.

They are read when the scores are there, as no registers are left to hold them before. A tensor that is broadcast over
rows or keys is read once for each key or row of a thread. Keys are contiguous: a thread of forward reads its two
adjacent ones at once where strides allow (`CONFIG.pair_align`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .compat import Pointer, Scalar
from .ptx import add_adjacent, hide_adjacent
from .softmax import INFINITY


class PairTensor(NamedTuple):
    """A mask or bias `[B, H, Sq, Sk]`. A broadcast row or column has no stride, a broadcast sequence or head 0."""

    data: Pointer  # `None` without it
    stride_b: Scalar
    stride_h: Scalar
    stride_m: Scalar
    stride_n: Scalar


class PairTensors(NamedTuple):
    """The tensors of a call."""

    bias: PairTensor
    mask: PairTensor
    pair_rows: Scalar  # of both


class PairBlock(NamedTuple):
    """A block of scores."""

    b: gl.tensor  # of a sequence that exists
    head: gl.tensor
    rows: gl.tensor  # [M, 1], or transposed
    keys: gl.tensor  # [1, N], or transposed
    stop: gl.tensor  # after the last key
    seqlen_k: gl.tensor
    bias: tuple  # its bias, where it has been read from shared memory (`bias_tiles`)


@gluon.jit
def add_bias(t, pairs, block, ALIGN: gl.constexpr):
    """The scores with their bias."""
    if len(block.bias) > 0:
        return t + block.bias[0].to(gl.float32)
    else:
        return with_values(t, pairs.bias, pairs.pair_rows, block, False, ALIGN)


@gluon.jit
def hide(t, pairs, block, partial, ALIGN: gl.constexpr):
    """The scores of visible pairs, -inf of hidden ones. With lists of blocks (`block_lists.partial_of`), the mask is
    read in partly visible blocks alone.
    """
    if pairs.mask.data is None:
        return t
    elif len(partial) > 0:
        if partial[0]:
            t = with_values(t, pairs.mask, pairs.pair_rows, block, True, ALIGN)
        return t
    else:
        return with_values(t, pairs.mask, pairs.pair_rows, block, True, ALIGN)


@gluon.jit
def with_values(t, x, num_rows, block, HIDES: gl.constexpr, ALIGN: gl.constexpr):
    """Scores with the elements of a bias, or (HIDES) of a mask."""
    if x.data is None:
        return t
    else:
        pointers = pointers_of(x, num_rows, block, ALIGN)
        if x.stride_n is None:
            t = with_loaded(t, gl.load(pointers), HIDES)
        elif ALIGN > 1 and x.stride_m is not None and block.keys.shape[0] == 1:
            if block.stop <= block.seqlen_k:
                t = hide_adjacent(t, pointers) if HIDES else add_adjacent(t, pointers)
            else:
                t = with_loaded(t, load_existing(pointers, block), HIDES)
        else:
            t = with_loaded(t, load_existing(pointers, block), HIDES)
        return t


@gluon.jit
def with_loaded(t, values, HIDES: gl.constexpr):
    """Scores with elements that have been loaded."""
    return gl.where(values != 0, t, -INFINITY) if HIDES else t + values.to(gl.float32)


@gluon.jit
def pointers_of(x, num_rows, block, ALIGN: gl.constexpr):
    """Addresses of a block's elements. Rows outside of the tensor get those of its first or last one."""
    pointers = x.data + (block.b.to(gl.int64) * x.stride_b + block.head.to(gl.int64) * x.stride_h) * ALIGN
    if x.stride_m is not None:
        row = gl.minimum(gl.maximum(block.rows, 0), num_rows - 1)
        pointers += row.to(gl.int64) * x.stride_m * ALIGN
    if x.stride_n is not None:
        pointers += block.keys
    return pointers


@gluon.jit
def load_existing(pointers, block):
    """Load elements, 0 for keys past the last one."""
    return gl.load(pointers, mask=block.keys < block.seqlen_k, other=0)
