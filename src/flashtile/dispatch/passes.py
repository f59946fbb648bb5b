"""The functions that run a plan: its backend's, or of two backends that share the gradients."""

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torch import Tensor

from ..call.cache import CacheCall, append_and_rotate
from ..call.call import Call, Gradients, Needs
from ..call.plan import Plan

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
