"""A score_mod in a kernel: the device functions of its formula (`backend.gpu.staged`), a constant of the kernel.

Elements of captured tensors that depend on a row or a key alone are loaded before the scores that they change, once for
each row or key of a thread.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .distances import distances


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
    """Elements of captured tensors that depend on no pair; without a score_mod, unused."""

    head: tuple
    rows: tuple
    keys: tuple


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
    TRANSPOSED: gl.constexpr = rows.shape[0] == 1
    first = first_distance + (params.inputs.i0 - params.inputs.j0)
    if SCORE_MOD.reach is None:
        results = of_pairs(SCORE_MOD.pairs, t, params, b, head, rows, keys, first, loaded, SCORE_MOD)
    else:
        least = first - (t.shape[0 if TRANSPOSED else 1] - 1)
        most = first + (t.shape[1 if TRANSPOSED else 0] - 1)
        if least >= SCORE_MOD.reach:
            results = of_pairs(SCORE_MOD.before, t, params, b, head, rows, keys, first, loaded, SCORE_MOD)
        elif most <= -SCORE_MOD.reach:
            results = of_pairs(SCORE_MOD.after, t, params, b, head, rows, keys, first, loaded, SCORE_MOD)
        else:
            results = of_pairs(SCORE_MOD.pairs, t, params, b, head, rows, keys, first, loaded, SCORE_MOD)
    return results[0], results


@gluon.jit
def of_pairs(function: gl.constexpr, t, params, b, head, rows, keys, first, loaded, SCORE_MOD: gl.constexpr):
    """The results of a function of pairs; `first` is the distance of the first one."""
    inputs = params.inputs
    TRANSPOSED: gl.constexpr = rows.shape[0] == 1
    results = function(
        t, sequence_index(params, b), head + inputs.h0, rows + inputs.i0, keys + inputs.j0,
        distances(t, first, TRANSPOSED, gl.int32), distances(t, first, TRANSPOSED, gl.float32),
        inputs.captured, loaded.head, loaded.rows, loaded.keys,
    )  # fmt: skip
    zero = gl.full_like(t, 0.0)
    if len(results) == 1:
        return (results[0] - zero,)
    elif SCORE_MOD.same:
        return (results[0] - zero, results[1])
    else:
        return (results[0] - zero, results[1] - zero)  # one for every pair, whichever function it is


@gluon.jit
def sequence_index(params, b):
    """Index of a sequence in the whole call. Tokens outside all sequences have b = batch; none of their pairs is
    visible.
    """
    return gl.minimum(b, params.batch - 1) + params.inputs.b0
