"""Calls that are observed when they run: for an example, which is not computed, and for a log.

`counting.opened` is what makes calls take the operators' way, where they are seen: without it nothing here is asked.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ..call import counting
from ..call.call import Call, Needs, Tangents, differentiable_positions, lse_shape, new_rows, row_stats_shape
from ..call.problem import Problem, accumulation_dtype
from ..call.record import record_of
from ..locks import process_lock

LOG_VARIABLE = "FLASHTILE_LOG_CALLS"
See = Callable[..., None]  # gets a call and the gradients of a backward pass; in forward mode also the inputs that move

_example: See | None = None  # for all threads: autograd has some of its own
_known: set[Any] = set()  # kinds of calls in the log
_lock = process_lock()


@contextmanager
def example(see: See) -> Iterator[None]:
    """Inside, `see` gets every pass of every call, and results are zeros."""
    global _example
    with _lock, counting.calls():
        before, _example = _example, see
        try:
            yield
        finally:
            _example = before


def forward(call: Call) -> tuple[Tensor, Tensor] | None:
    """Show a forward pass that is about to run; its results in an example."""
    if _example is None:
        log(call, None)
        return None
    _example(call, None)
    return zeros(call)


def zeros(call: Call) -> tuple[Tensor, Tensor]:
    """The results of a forward pass in an example."""
    t = call.tensors
    out = new_rows(t.q, t.q.shape[1], t.v.shape[-1], call.out_dtype).zero_() if t.out is None else t.out.zero_()
    return out, t.q.new_zeros(row_stats_shape(call), dtype=accumulation_dtype(t.q.dtype))


def backward(call: Call, needs: Needs) -> list[Tensor | None] | None:
    """As `forward`, of a backward pass."""
    if _example is None:
        log(call, needs)
        return None
    _example(call, needs)
    flat: Sequence[Tensor | None] = call.tensors.flat()
    wanted = zip(differentiable_positions(len(flat)), needs.flat(), strict=True)
    return [torch.zeros_like(x) if needed and (x := flat[n]) is not None else None for n, needed in wanted]


def tangents(call: Call, given: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """As `forward`, of a forward pass with tangents."""
    if _example is None:
        log(call, None, given.moves)
        return None
    _example(call, None, given.moves)
    out, row_stats = zeros(call)
    return out, row_stats, torch.zeros_like(out), row_stats.new_zeros(lse_shape(call.tensors.q))


def log(call: Call, needs: Needs | None, moves: Needs | None = None) -> None:
    """Add a line for a call of a new kind to the log: calls of one bucket have one plan. Of functions there is none."""
    path = os.environ.get(LOG_VARIABLE)
    if not path:
        return
    kind = (call.kind, Problem.describe(call.attention()).bucketed(), call.tensors.q.device.type, needs, moves)
    with _lock:
        if kind in _known:
            return
        _known.add(kind)
    if (record := record_of(call, needs, moves)) is not None:
        with suppress(OSError), open(path, "a") as file:
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


if os.environ.get(LOG_VARIABLE):  # in every process that inherits it
    counting.open_always()
