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
def shown_pairs(
    x, partial, params, b, head, first_row, first_key, TRANSPOSED: gl.constexpr, COLUMNS: gl.constexpr,
    CONFIG: gl.constexpr,
):  # fmt: skip
    """Bits `[M, 4]` of the pairs of a block `x` of rows and keys, or TRANSPOSED of keys and rows, in a tuple, which is
    empty where a mask function has none. `partial` is that of `block_lists`. Bits are computed for COLUMNS at once,
    whose elements are in registers together.
    """
    if not has_bits(len(partial), CONFIG):
        return ()
    else:
        bits = all_visible(x)
        if partial[0]:
            PARTS: gl.constexpr = x.shape[1] // COLUMNS
            layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
            part = gl.zeros([x.shape[0], COLUMNS], gl.float32, layout)
            bits = bits ^ bits
            for n in range(opaque(PARTS)):  # not unrolled
                row, key = first_row, first_key
                if TRANSPOSED:
                    row += n * COLUMNS
                else:
                    key += n * COLUMNS
                of_part = bits_of_part(part, params, b, head, row, key, TRANSPOSED, CONFIG)
                bits |= gl.convert_layout(of_part, bits.type.layout, assert_trivial=True) << (n * (COLUMNS // 4))
        return (bits,)


@gluon.jit
def bits_of_part(x, params, b, head, first_row, first_key, TRANSPOSED: gl.constexpr, CONFIG: gl.constexpr):
    """The bits of a block by the mask's function."""
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    layout: gl.constexpr = x.type.layout
    inputs = params.inputs
    first_side = gl.expand_dims(gl.arange(0, x.shape[0], gl.SliceLayout(1, layout)), 1)
    if TRANSPOSED:
        rows, keys, run = columns(first_row, x.shape[1], layout), first_key + first_side, None
    else:
        rows, keys = first_row + first_side, columns(first_key, x.shape[1], layout)
        first = first_key + inputs.j0
        run = KeyRun(columns(first.to(gl.int64), x.shape[1], layout), first + x.shape[1])
    distance = first_row - first_key + (inputs.i0 - inputs.j0)
    visible = SCORE_MOD.visible(
        sequence_index(params, b), head + inputs.h0, rows + inputs.i0, keys + inputs.j0,
        distances(x, distance, TRANSPOSED), real_distances(x, distance, TRANSPOSED), inputs.captured,
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
