"""Sharded calls: the way from the public functions to `flashtile.distributed`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .. import private_torch
from ..dynamo import untraced
from ..locks import process_lock

KEY = "flashtile.context_parallel"  # key of a thread's context

contexts_open = False  # in any thread of the process
innermost = ""  # the name of the context that was opened last in the process, by which compiled calls are guarded
traced: Callable[..., Any] | None = None  # sharded calls in graphs; `flashtile.distributed` sets it
# Sharded calls outside of graphs. `flashtile` sets it, as it imports `flashtile.distributed` at the first one.
run_public: Callable[..., Any] | None = None
_names: list[str] = []
_lock = process_lock()


@contextmanager
def inside(context: Any) -> Iterator[None]:
    """Set the context of this thread, and of the backward passes that it starts. `None` is no context."""
    outer, name = current(), context_name(context)
    private_torch.stash_in_thread(KEY, context)
    with _lock:
        _names.append(name)
        update_guards()
    try:
        yield
    finally:
        private_torch.stash_in_thread(KEY, outer)
        with _lock:
            del _names[len(_names) - 1 - _names[::-1].index(name)]
            update_guards()


def update_guards() -> None:
    """Set what compiled programs look at."""
    global contexts_open, innermost
    contexts_open, innermost = bool(_names), _names[-1] if _names else ""


def context_name(context: Any) -> str:
    """A name that equal contexts have."""
    return f"{hash(context):x}" if context is not None else "none"


def current() -> Any:
    """This thread's context, or `None`."""
    return private_torch.stashed_in_thread(KEY) if contexts_open else None


def run_traced(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a public function in a graph; `NotImplemented` if the call has to break the graph."""
    if innermost == "" or traced is None or not is_innermost():  # the first one is a guard
        return NotImplemented
    return traced(name, args, kwargs)


@private_torch.constant_result
def is_innermost() -> bool:
    """Whether this thread's context is the one that was opened last in the process."""
    context = current()
    return context is not None and context_name(context) == innermost


@untraced
def run_sharded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a public function whose call is in a context or has DTensors; `NotImplemented` of another."""
    context = current()
    if context is None and not is_dtensor(args[0] if args else kwargs.get("q")):
        return NotImplemented
    assert run_public is not None
    return run_public(function.__name__, args, kwargs, context)


def is_dtensor(x: Any) -> bool:
    """Whether this is a DTensor. There is none before PyTorch's module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
