"""How a pass runs: the function of its plan's backend, or of two backends that share the gradients, and the context
around it.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..call.cache import CacheCall, append_and_rotate
from ..call.call import Call, Gradients, Needs, Tangents
from ..call.plan import Plan
from . import forking
from .planner import plan_call

Rows = Tensor | None  # out, lse, dout and dlse


@functools.cache
def entry_of(backend: str) -> ModuleType:
    return importlib.import_module(f"flashtile.backend.{backend}.entry")


def function_of(plan: Plan, kind: str) -> Callable[..., Any]:
    """The function for a kind of pass, which takes the plan first. KV-cache calls of a backend without a function for
    them append by another backend's kernel, or in torch operations.
    """
    if plan.rest is not None:
        return shared_backward
    entry = entry_of(plan.backend)
    if kind == CacheCall.kind and not hasattr(entry, kind):
        return lambda plan, call: entry.forward(plan, append_of(plan, call)(call))
    return getattr(entry, kind)


def appending_entry(plan: Plan) -> ModuleType | None:
    """The backend whose kernel appends for a plan's KV-cache calls, if its entry names one."""
    backend = getattr(entry_of(plan.backend), "APPENDING_BACKEND", None)
    return None if backend is None else entry_of(backend)


def append_of(plan: Plan, call: CacheCall) -> Callable[[CacheCall], Call]:
    """The function that appends and rotates for a backend, and returns the attention that remains."""
    entry = appending_entry(plan)
    if entry is not None and call.tensors.q.is_cuda:
        return entry.append  # type: ignore[no-any-return]
    return append_and_rotate


def recorder_of(plan: Plan, kind: str) -> Callable[..., Any] | None:
    """As `function_of`, the function that also returns one which repeats the pass; `None` if there is none."""
    record = getattr(entry_of(plan.backend), f"record_{kind}", None)
    if record is None and kind == CacheCall.kind and hasattr(entry_of(plan.backend), "record_forward"):
        record = record_with_cache
    if plan.rest is None or record is None:
        return record
    return None if recorder_of(plan.rest.plan, kind) is None else record_shared_backward


def record_with_cache(plan: Plan, call: CacheCall) -> tuple[Any, Any]:
    """A KV-cache call of a backend without a function for them, and the function that repeats it."""
    append, entry = append_of(plan, call), appending_entry(plan)
    if entry is None or append is append_and_rotate:
        attention = append(call)
    else:
        append, attention = entry.record_append(call)
    repeat, results = entry_of(plan.backend).record_forward(plan, attention)
    return None if repeat is None else lambda call: repeat(append(call)), results


def shared_backward(plan: Plan, call: Call, _: Needs, *rows: Rows) -> Gradients:
    """The gradients of both backends of a plan (`call.plan.Rest`), each from the same results of forward."""
    rest = plan.rest
    assert rest is not None
    first = entry_of(plan.backend).backward(plan, call, rest.own, *rows)
    second = entry_of(rest.plan.backend).backward(rest.plan, call, rest.needs, *rows)
    return Gradients.from_flat(merged(first.flat(), second.flat()))


def record_shared_backward(plan: Plan, call: Call, _: Needs, *rows: Rows) -> tuple[Any, Gradients]:
    """As `shared_backward`, and the function that repeats it for calls of the same layout."""
    rest = plan.rest
    assert rest is not None
    replay, first = entry_of(plan.backend).record_backward(plan, call, rest.own, *rows)
    replay_rest, second = entry_of(rest.plan.backend).record_backward(rest.plan, call, rest.needs, *rows)

    def repeat(call: Call, *rows: Rows) -> list[Rows]:
        return merged(replay(call, *rows), replay_rest(call, *rows))

    return repeat, Gradients.from_flat(merged(first.flat(), second.flat()))


def merged(first: Sequence[Rows], second: Sequence[Rows]) -> list[Rows]:
    """Each gradient from the backend that has computed it."""
    return [y if x is None else x for x, y in zip(first, second, strict=True)]


def second(
    plan: Plan, call: Call, along: Tangents, needs: Needs, dout: Rows, dlse: Rows
) -> tuple[Tensor, Tensor, Gradients]:
    """The tangents of out and lse, and their gradients. The pass that the plan's backend starts from, if any, runs in
    the backend that is the fastest at it.
    """
    entry = entry_of(plan.backend)
    if not hasattr(entry, "before_second"):
        return entry.second(plan, call, along, needs, dout, dlse)  # type: ignore[no-any-return]
    kind = entry.before_second(plan)
    before = plan_call(call, moves=along.moves if kind == "tangents" else None)
    given = (along,) if kind == "tangents" else ()
    rows = function_of(before, kind)(before, call, *given)
    return entry.second(plan, call, along, needs, dout, dlse, rows)  # type: ignore[no-any-return]


def inside_operator(call: Call) -> AbstractContextManager[None]:
    """A context for an operator's own work, wherever it is called from.

    Autocast is off: it has acted on the arguments, in `normalize`, and products keep their dtypes. Grad mode is off,
    but autograd is on, because backends differentiate tiles by it, also in compiled graphs, which call from below it.

    A plain eager call needs neither: it has no graph, or `autograd` has made a node.
    """
    around = private_torch.is_any_autocast_enabled() or (not call.is_plain_eager and torch.is_grad_enabled())
    inside = Inside(call.tensors.q.device.type) if around or private_torch.below_autograd() else ALREADY_INSIDE
    return forking.OneThread(inside) if forking.forked else inside


class Inside(AbstractContextManager[None]):
    def __init__(self, device_type: str):
        # meta has no autocast to ask about
        self.autocast = device_type != "meta" and torch.is_autocast_enabled(device_type)
        self.device_type = device_type

    def __enter__(self) -> None:
        self.guard = private_torch.with_autograd()
        if self.guard is not None:
            self.guard.__enter__()
        self.grad = torch.is_grad_enabled()
        private_torch.set_grad_enabled(False)
        if self.autocast:  # a torch.autocast takes longer than the rest
            torch.set_autocast_enabled(self.device_type, False)

    def __exit__(self, *error: Any) -> None:
        if self.autocast:
            torch.set_autocast_enabled(self.device_type, True)
        private_torch.set_grad_enabled(self.grad)
        if self.guard is not None:
            self.guard.__exit__(*error)


ALREADY_INSIDE = nullcontext()
