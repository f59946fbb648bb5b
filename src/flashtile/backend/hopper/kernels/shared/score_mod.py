"""A score_mod in a kernel: the device functions of its formula (`backend.gpu.staged`), a constant of the kernel.

Elements of captured tensors that depend on a row or a key alone are loaded before the scores that they change, once for
each row or key of a thread.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .distances import distances
from .pairs import PairBlock


class PairInputs(NamedTuple):
    """Arguments of a score_mod: the position of this call in the whole one, and captured tensors."""

    b0: gl.tensor
    h0: gl.tensor
    i0: gl.tensor
    j0: gl.tensor
    captured: tuple  # pointers, sizes and strides


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
def modify(t, params, b, head, rows, keys, first_distance, loaded, SCORE_MOD: gl.constexpr):
    """The new scores, then in backward their derivatives by `t`, which may be of fewer dimensions."""
    inputs = params.inputs
    sequence = sequence_index(params, b)
    TRANSPOSED: gl.constexpr = rows.shape[0] == 1
    first = first_distance + (inputs.i0 - inputs.j0)
    distance = distances(t, first, TRANSPOSED, gl.int32)
    real_distance = distances(t, first, TRANSPOSED, gl.float32)
    b, h, i, j, captured = sequence, head + inputs.h0, rows + inputs.i0, keys + inputs.j0, inputs.captured
    if len(loaded.partial) == 0:
        results = SCORE_MOD.pairs(
            t, b, h, i, j, distance, real_distance, captured, loaded.head, loaded.rows, loaded.keys
        )  # fmt: skip
        return results[0] - gl.full_like(t, 0.0), results  # a score for every pair
    else:
        head_of, rows_of = loaded.head, loaded.rows
        if loaded.partial[0]:
            keys_of = loaded_keys(b, h, j, captured, loaded, TRANSPOSED, SCORE_MOD)
            results = SCORE_MOD.pairs(t, b, h, i, j, distance, real_distance, captured, head_of, rows_of, keys_of)
            results = shaped(t, results, SCORE_MOD)
        else:
            results = SCORE_MOD.unmasked(
                t, b, h, i, j, distance, real_distance, captured, head_of, rows_of, loaded.keys
            )
            results = shaped(t, results, SCORE_MOD)
        return results[0], results


@gluon.jit
def loaded_keys(b, h, keys, captured, loaded, TRANSPOSED: gl.constexpr, SCORE_MOD: gl.constexpr):
    """Elements of keys; those of a KeyRun are loaded now."""
    if SCORE_MOD.mask_only and not TRANSPOSED:
        return SCORE_MOD.keys(b, h, keys, captured, loaded.keys)
    else:
        return loaded.keys


@gluon.jit
def shaped(t, results, SCORE_MOD: gl.constexpr):
    """Results for every pair, but for a derivative that is the same for all."""
    new = (results[0] - gl.full_like(t, 0.0),)
    if len(results) > 1:
        if SCORE_MOD.same:
            return new + (results[1],)
        else:
            return new + (results[1] - gl.full_like(t, 0.0),)
    else:
        return new


@gluon.jit
def sequence_index(params, b):
    """Index of a sequence in the whole call. Tokens outside all sequences have b = batch; none of their pairs is
    visible.
    """
    return gl.minimum(b, params.batch - 1) + params.inputs.b0
