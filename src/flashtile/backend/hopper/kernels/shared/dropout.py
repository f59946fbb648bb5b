"""Dropout: which pairs of a block of scores are kept (docs/contract.md)."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_masks import all_visible, both_where_bits_at, from_thread_view, thread_view, where_bits_at
from .compat import Pointer, Scalar
from .philox_ptx import keep_bits


class Dropout(NamedTuple):
    """Arguments of dropout; without it, all are `None`."""

    seed: Pointer  # int64
    dropout_first_head: Scalar  # the counter of sequence 0 and head 0
    dropout_heads: Scalar  # of the whole call
    dropout_i0: Scalar  # position of the first row in the whole call
    dropout_octet0: Scalar  # position of the first key there, in octets
    threshold: Scalar
    keep_scale: Scalar  # factor of kept probabilities


class DropoutStream(NamedTuple):
    """The seed, and the threshold in two numbers for `philox_ptx.collect_asm`."""

    key_0: gl.tensor
    key_1: gl.tensor
    addend: gl.tensor
    majority: gl.tensor


@gluon.jit
def load_stream(dropout):
    """The numbers that all blocks share; an empty tuple without dropout."""
    if dropout.seed is None:
        return ()
    else:
        word = gl.load(dropout.seed)
        is_small = dropout.threshold < 32768
        lower = gl.where(is_small, dropout.threshold, dropout.threshold - 32768)
        addend = (32768 - lower) * 65537
        return DropoutStream(word.to(gl.int32), (word >> 32).to(gl.int32), addend, gl.where(is_small, -1, 0))


@gluon.jit
def kept_pairs(dropout, stream, b, head, first_row, first_key, x, TRANSPOSED: gl.constexpr):
    """`[M, 4]`: bits of the kept pairs of a block `x` of rows and keys; TRANSPOSED, of keys and rows. In a tuple, which
    is empty without dropout.
    """
    if dropout.seed is None:
        return ()
    else:
        M: gl.constexpr = x.shape[0]
        CALLS: gl.constexpr = x.shape[1] // 32
        layout: gl.constexpr = all_visible(x).type.layout
        zeros = gl.zeros([M, 4], gl.int32, layout)
        i = gl.expand_dims(gl.arange(0, M, gl.SliceLayout(1, layout)), 1)
        t = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, layout)), 0)
        row, octet = first_row + dropout.dropout_i0, first_key // 8 + dropout.dropout_octet0
        if TRANSPOSED:
            thread = zeros + i % 8
            rows, octets = row + 4 * CALLS * thread + 2 * t, zeros + octet + i // 8
        else:
            thread = zeros + t
            rows, octets = zeros + row + i, octet + CALLS * thread
        whole_head = dropout.dropout_first_head + b * dropout.dropout_heads + head
        return (keep_bits(rows, octets, thread, whole_head, stream, CALLS, TRANSPOSED),)


@gluon.jit
def where_kept(kept, x, TRANSPOSED: gl.constexpr):
    """`x [M, N]` of kept pairs, 0 of dropped ones."""
    if len(kept) == 0:
        return x
    else:
        view = thread_view(x)
        return from_thread_view(where_bits_at(kept[0], places(view, TRANSPOSED), view, 0.0), x)


@gluon.jit
def both_where_kept(kept, x, y, TRANSPOSED: gl.constexpr):
    """The same for two blocks, with one test of each bit."""
    if len(kept) == 0:
        return x, y
    else:
        view = thread_view(x)
        x_view, y_view = both_where_bits_at(kept[0], places(view, TRANSPOSED), view, thread_view(y))
        return from_thread_view(x_view, x), from_thread_view(y_view, y)


@gluon.jit
def places(view, TRANSPOSED: gl.constexpr):
    """The bit of each pair in `kept_pairs`."""
    layout: gl.constexpr = view.type.layout
    OCTETS: gl.constexpr = view.shape[1]
    o = gl.arange(0, OCTETS, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    o = gl.expand_dims(gl.expand_dims(gl.expand_dims(o, 0), 2), 3)
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 0), 1), 2)
    if TRANSPOSED:
        G: gl.constexpr = OCTETS // 8
        maker = o // G
        return maker // 2 * 8 + (8 - 4 * G) + (o % G * 2 + pair) * 2 + maker % 2
    else:
        G: gl.constexpr = OCTETS // 4
        return o // G * 8 + (8 - 2 * G) + o % G * 2 + pair
