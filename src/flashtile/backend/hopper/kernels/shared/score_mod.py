"""A score_mod in a kernel: the device functions of its formula (`backend.gpu.staged`), a constant of the kernel.

Elements of captured tensors that depend on a row or a key alone are loaded before the scores that they change, once for
each row or key of a thread.
"""

from typing import NamedTuple

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....gpu.grouped import Captured
from .compat import Scalar
from .distances import distances, real_distances
from .pairs import PairBlock
from .ptx import opaque_real


class PairInputs(NamedTuple):
    """Arguments of a score_mod: the position of this call in the whole one, and captured tensors."""

    b0: Scalar
    h0: Scalar
    i0: Scalar
    j0: Scalar
    captured: Captured


class KeyRun(NamedTuple):
    """Consecutive keys, as positions in the whole call."""

    keys: gl.tensor  # [1, N], int64
    stop: gl.tensor  # the first position after them


class Loaded(NamedTuple):
    """Elements of captured tensors that depend on no pair, for a score_mod; and the block, for bias and mask."""

    head: tuple
    rows: tuple
    keys: tuple  # or their KeyRun, of which they are loaded when the mask's code runs
    partial: tuple  # with lists of blocks, whether the mask's code has to run (`block_lists.partial_of`)
    pairs: PairBlock


@gluon.jit
def head_factor(params, b, head, loaded, SCORE_MOD: gl.constexpr):
    """The number by which a score_mod multiplies the scores of a head."""
    inputs = params.inputs
    return SCORE_MOD.factor(sequence_index(params, b), head + inputs.h0, inputs.captured, loaded.head)[0].to(gl.float32)


@gluon.jit
def load_head(params, b, head, SCORE_MOD: gl.constexpr):
    """Load the elements that depend on the sequence and head."""
    if SCORE_MOD is None:
        return ()
    else:
        return SCORE_MOD.head(sequence_index(params, b), head + params.inputs.h0, params.inputs.captured)


@gluon.jit
def load_rows(params, b, head, rows, SCORE_MOD: gl.constexpr):
    """Load the elements that depend on rows."""
    if SCORE_MOD is None:
        return ()
    else:
        inputs = params.inputs
        return SCORE_MOD.rows(sequence_index(params, b), head + inputs.h0, rows + inputs.i0, inputs.captured)


@gluon.jit
def load_keys(params, b, head, keys, run, SCORE_MOD: gl.constexpr):
    """Load the elements that depend on keys. `run` may be `None`."""
    if SCORE_MOD is None:
        return ()
    else:
        inputs = params.inputs
        return SCORE_MOD.keys(sequence_index(params, b), head + inputs.h0, keys + inputs.j0, inputs.captured, run)


@gluon.jit
def modify(t, scale, params, b, head, rows, keys, first_distance, loaded, SCORE_MOD: gl.constexpr):
    """The new scores, then in backward their derivatives by scores, which may be of fewer dimensions. Scores are `t`
    times a scale that may be `None`.
    """
    TRANSPOSED: gl.constexpr = rows.shape[0] == 1
    first = first_distance + (params.inputs.i0 - params.inputs.j0)
    if len(loaded.partial) > 0:
        if loaded.partial[0]:
            keys_of = loaded_keys(params, b, head, keys, loaded, TRANSPOSED, SCORE_MOD)
            results = of_pairs(0, t, scale, params, b, head, rows, keys, first, loaded, keys_of, SCORE_MOD)
        else:
            results = of_pairs(3, t, scale, params, b, head, rows, keys, first, loaded, loaded.keys, SCORE_MOD)
    elif SCORE_MOD.reach is None:
        results = of_pairs(0, t, scale, params, b, head, rows, keys, first, loaded, loaded.keys, SCORE_MOD)
    else:
        least = first - (t.shape[0 if TRANSPOSED else 1] - 1)
        most = first + (t.shape[1 if TRANSPOSED else 0] - 1)
        if least >= SCORE_MOD.reach:
            results = of_pairs(1, t, scale, params, b, head, rows, keys, first, loaded, loaded.keys, SCORE_MOD)
        elif most <= -SCORE_MOD.reach:
            results = of_pairs(2, t, scale, params, b, head, rows, keys, first, loaded, loaded.keys, SCORE_MOD)
        else:
            results = of_pairs(0, t, scale, params, b, head, rows, keys, first, loaded, loaded.keys, SCORE_MOD)
    return results[0], results


@gluon.jit
def loaded_keys(params, b, head, keys, loaded, TRANSPOSED: gl.constexpr, SCORE_MOD: gl.constexpr):
    """Elements of keys; those of a KeyRun are loaded now."""
    if SCORE_MOD.mask_only and not TRANSPOSED:
        inputs = params.inputs
        return SCORE_MOD.keys(
            sequence_index(params, b), head + inputs.h0, keys + inputs.j0, inputs.captured, loaded.keys
        )  # fmt: skip
    else:
        return loaded.keys


@gluon.jit
def of_pairs(
    SIDE: gl.constexpr, t, scale, params, b, head, rows, keys, first, loaded, keys_of, SCORE_MOD: gl.constexpr
):
    """The results of one of four functions of pairs; `first` is the distance of the first pair."""
    function: gl.constexpr = function_of(SCORE_MOD, SIDE)
    inputs = params.inputs
    TRANSPOSED: gl.constexpr = rows.shape[0] == 1
    if scale is not None:
        # Products before the branches would not join the sums in them.
        t = t * (scale if SCORE_MOD.reach is None else opaque_real(scale, SIDE))
    results = function(
        t, sequence_index(params, b), head + inputs.h0, rows + inputs.i0, keys + inputs.j0,
        distances(t, first, TRANSPOSED), real_distances(t, first, TRANSPOSED),
        inputs.captured, loaded.head, loaded.rows, keys_of,
    )  # fmt: skip
    zero = gl.full_like(t, 0.0)
    score = results[0] - zero  # one for every pair
    if SCORE_MOD.reach is not None:
        score = opaque_real(score, SIDE)
    if len(results) == 1:
        return (score,)
    elif SCORE_MOD.same:
        return (score, results[1])
    else:
        return (score, results[1] - zero)


@constexpr_function
def function_of(score_mod, side):
    """A device function: of all pairs, of those before the diagonal, of those after it, or of visible ones."""
    return (score_mod.pairs, score_mod.before, score_mod.after, score_mod.unmasked)[side]


@gluon.jit
def sequence_index(params, b):
    """Index of a sequence in the whole call. Tokens outside all sequences have b = batch; none of their pairs is
    visible.
    """
    return gl.minimum(b, params.batch - 1) + params.inputs.b0
