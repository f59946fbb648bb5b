"""Compute the table of a score_mod's term of distances once a call (`expression.tabulated`), and from the
table's gradient the gradients of the tensors that the term reads.
"""

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs
from ...call.formulas import traced
from ...call.problem import accumulation_dtype
from ...expression import Formula, score_mod_formula, torch_code
from ...expression.tabulated import tabulated
from . import arguments as args
from . import targets
from .launch import allocate
from .machine_code import function_address
from .targets import Target
from .variant import TABLE, TableVariant
from .workspace import round_up

FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)


class DistanceTable(NamedTuple):
    """How to compute a table, and the key of the formula that reads it."""

    function: Any
    term: Formula
    reach: int
    key: str


def with_distance_table(call: Call) -> Call:
    """The call whose score_mod reads a table, behind its own tensors; the call itself without a term of distances."""
    found = distance_table_of(call)
    if found is None:
        return call
    t, own = call.tensors, call.num_score_tensors
    real = accumulation_dtype(t.q.dtype)
    heads, width = call.settings.h0 + t.q.shape[1], round_up(2 * found.reach + 1, args.vector_lanes(call))
    table = allocate((heads, width), (width, 1), real)
    captured = args.captured_tensors(call)
    entries = args.captured_table(captured).get("captured")
    found.function(0 if entries is None else entries.data_ptr(), table.data_ptr(), heads, width, found.reach)
    del captured, entries
    tensors = (*t.score_mod_tensors[:own], table, *t.score_mod_tensors[own:])
    return call._replace(
        tensors=t._replace(score_mod_tensors=tensors), settings=call.settings._replace(score_mod=found.key)
    )


def needs_with_table(call: Call, needs: Needs) -> Needs:
    """The gradients of `with_distance_table(call)` from which the call's follow."""
    own, wanted = call.num_score_tensors, needs.score_mod_tensors
    if not any(wanted) or distance_table_of(call) is None:
        return needs
    return needs._replace(score_mod_tensors=(*wanted[:own], True, *wanted[own:]))


def without_table(call: Call, needs: Needs, grads: Gradients) -> Gradients:
    """The gradients of a call from the gradients of `with_distance_table(call)`: the table's is one of the tensors it
    is of.
    """
    found = distance_table_of(call)
    if found is None:
        return grads
    own, wanted, of_tensors = call.num_score_tensors, needs.score_mod_tensors, [*grads.score_mod_tensors]
    of_table = of_tensors.pop(own)
    if of_table is not None:
        for n, term in term_gradients(found, call, [n < own and x for n, x in enumerate(wanted)], of_table):
            before = of_tensors[n]
            assert before is not None
            of_tensors[n] = before + term
    return grads._replace(score_mod_tensors=tuple(of_tensors))


def term_gradients(
    found: DistanceTable, call: Call, wanted: list[bool], of_table: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """The gradient of each element that the term reads, by the number of its tensor. Distances that no visible pair has
    have a gradient of 0, and add nothing where the derivative is not finite.
    """
    partials = found.term.partials(wanted[: call.num_score_tensors])
    tensors = [x.detach() for x in call.tensors.score_mod_tensors]
    h, distance = torch.arange(len(of_table))[:, None], torch.arange(of_table.shape[1]) - found.reach
    positions = distance.clamp(min=0), (-distance).clamp(min=0)
    score = torch.zeros((), dtype=of_table.dtype)
    values = torch_code.run(partials.program, (score, torch.zeros((), dtype=torch.int64), h, *positions), tensors)
    for load in partials.loads:
        x = tensors[load.tensor]
        indices = [values[n].expand(of_table.shape) for n in load.indices]
        counts = of_table != 0
        for index, size in zip(indices, x.shape, strict=True):
            counts = counts & (index >= 0) & (index < size)
        terms = torch.where(counts, of_table * values[load.partial], 0).double()
        sums = torch.zeros(x.shape, dtype=torch.float64)
        if not indices:
            sums = terms.sum()
        elif x.numel():
            sums.index_put_(tuple(torch.where(counts, index, 0) for index in indices), terms, accumulate=True)
        yield load.tensor, sums.to(of_table.dtype)


def distance_table_of(call: Call) -> DistanceTable | None:
    if call.settings.score_mod is None:
        return None
    t = call.tensors
    wide = args.needs_wide_offsets(t.score_mod_tensors[: call.num_score_tensors])
    dtype = args.DTYPE_NAMES[accumulation_dtype(t.q.dtype)]
    return distance_table(call.settings.score_mod, dtype, wide, targets.host())


@functools.lru_cache(maxsize=1024)
def distance_table(score_mod: str, real_dtype: str, wide: bool, target: Target) -> DistanceTable | None:
    """The table for the score_mod with this key, if it has a term of distances."""
    found = tabulated(traced(score_mod_formula(score_mod)), real_dtype)
    if found is None:
        return None
    variant = TableVariant(real_dtype, found.term, wide)
    return DistanceTable(FUNCTION(function_address(TABLE, variant, target)), found.term, found.reach, found.formula.key)
