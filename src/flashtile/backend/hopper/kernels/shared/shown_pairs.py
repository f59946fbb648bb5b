"""Pairs of a block that a mask function shows, as bits (`column_masks`), in calls with lists of blocks and without a
score_mod.

They are computed in partly visible blocks alone, while the products of scores are in flight. After the scores, each
step would wait for the elements of its positions.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_masks import all_visible, bits_of
from .distances import columns, distances, real_distances
from .ptx import opaque
from .score_mod import KeyRun, load_head, load_keys, load_rows, sequence_index


@constexpr_function
def has_bits(lists, CONFIG):
    """Whether a call has a mask function alone, and `lists` of blocks."""
    return lists > 0 and CONFIG.score_mod is not None and CONFIG.score_mod.mask_only


@gluon.jit
def shown_keys(x, partial, params, b, head, first_row, first_key, CONFIG: gl.constexpr):
    """Bits `[M, 4]` of the pairs of a block `x` of rows and keys, in a tuple, which is empty where a mask function has
    none. `partial` is that of `block_lists`.
    """
    if not has_bits(len(partial), CONFIG):
        return ()
    else:
        bits = all_visible(x)
        if partial[0]:
            bits = bits_of_keys(x, params, b, head, first_row, first_key, CONFIG)
        return (bits,)


@gluon.jit
def shown_rows(x, partial, params, b, head, rows, keys, first_distance, CONFIG: gl.constexpr):
    """The same for a block of keys and rows, `x [N, M]`."""
    if not has_bits(len(partial), CONFIG):
        return ()
    else:
        SCORE_MOD: gl.constexpr = CONFIG.score_mod
        bits = all_visible(x)
        if partial[0]:
            bits = function_bits(x, params, b, head, rows, keys, first_distance, None, SCORE_MOD)
        return (bits,)


@gluon.jit
def bits_of_keys(x, params, b, head, first_row, first_key, CONFIG: gl.constexpr):
    """The bits of a block, by parts of CONFIG.mask_columns keys, whose elements are in registers together."""
    N: gl.constexpr = x.shape[1]
    PART: gl.constexpr = min(CONFIG.mask_columns, N)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    part = gl.zeros([x.shape[0], PART], gl.float32, layout)
    rows = gl.expand_dims(first_row + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)), 1)
    if PART == N:
        return bits_from(part, params, b, head, rows, first_row, first_key, CONFIG)
    else:
        bits = all_visible(x) ^ all_visible(x)
        for n in range(opaque(N // PART)):  # not unrolled
            of_part = bits_from(part, params, b, head, rows, first_row, first_key + n * PART, CONFIG)
            bits |= gl.convert_layout(of_part, bits.type.layout, assert_trivial=True) << (n * (PART // 4))
        return bits


@gluon.jit
def bits_from(x, params, b, head, rows, first_row, first_key, CONFIG: gl.constexpr):
    """The bits of a part of a block."""
    PART: gl.constexpr = x.shape[1]
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    layout: gl.constexpr = x.type.layout
    first = first_key + params.inputs.j0
    run = KeyRun(columns(first.to(gl.int64), PART, layout), first + PART)
    keys = columns(first_key, PART, layout)
    return function_bits(x, params, b, head, rows, keys, first_row - first_key, run, SCORE_MOD)


@gluon.jit
def function_bits(x, params, b, head, rows, keys, first_distance, run, SCORE_MOD: gl.constexpr):
    """The bits of a block by the mask's function. `run` are the keys as a `KeyRun` or `None`."""
    TRANSPOSED: gl.constexpr = rows.shape[0] == 1
    inputs = params.inputs
    first = first_distance + (inputs.i0 - inputs.j0)
    visible = SCORE_MOD.visible(
        sequence_index(params, b), head + inputs.h0, rows + inputs.i0, keys + inputs.j0,
        distances(x, first, TRANSPOSED), real_distances(x, first, TRANSPOSED), inputs.captured,
        load_head(params, b, head, SCORE_MOD), load_rows(params, b, head, rows, SCORE_MOD),
        load_keys(params, b, head, keys, run, SCORE_MOD),
    )[0]  # fmt: skip
    return bits_of(visible & (gl.full_like(x, 0.0) == 0.0))  # of every pair


@gluon.jit
def with_shown(visible, shown):
    """Bits of pairs that are visible by the window and by a mask function."""
    if len(shown) > 0:
        visible = visible & shown[0]
    return visible


@gluon.jit
def is_cut(cut, partial, shown):
    """Whether bits are to be tested in a block: where the window cuts it, or a mask function's bits may hide pairs."""
    if len(shown) > 0:
        cut = cut | partial[0]
    return cut
