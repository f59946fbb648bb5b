"""The pairs of a block that a mask function shows, as bits (`column_masks`), of calls with lists of blocks and without a
score_mod.

They are computed in partly visible blocks alone, while the products of scores are in flight: loading the elements of 128
positions after the scores would take a fourth of a step, and hold 32 registers of a thread for each captured tensor.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .column_masks import all_visible, bits_of
from .distances import distances, real_distances
from .score_mod import load_head, load_keys, load_rows, sequence_index


@gluon.jit
def shown_pairs(x, partial, params, b, head, rows, keys, first_distance, run, CONFIG: gl.constexpr):
    """Bits `[M, 4]` of the pairs of a block `x`, in a tuple, which is empty where a mask function has none. `partial`
    is that of `block_lists`; `run` are the keys as a `KeyRun` or `None`.
    """
    SCORE_MOD: gl.constexpr = CONFIG.score_mod
    if SCORE_MOD is None:
        return ()
    elif len(partial) == 0 or not SCORE_MOD.mask_only:
        return ()
    else:
        bits = all_visible(x)
        if partial[0]:
            bits = function_bits(x, params, b, head, rows, keys, first_distance, run, SCORE_MOD)
        return (bits,)


@gluon.jit
def function_bits(x, params, b, head, rows, keys, first_distance, run, SCORE_MOD: gl.constexpr):
    """The bits by the mask's function."""
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
    """Bits of pairs that are visible by the window and by `shown_pairs`."""
    if len(shown) > 0:
        visible = visible & shown[0]
    return visible


@gluon.jit
def is_cut(cut, partial, shown):
    """Whether bits are to be tested in a block: where the window cuts it, or a mask's bits hide some pairs."""
    if len(shown) > 0:
        cut = cut | partial[0]
    return cut
