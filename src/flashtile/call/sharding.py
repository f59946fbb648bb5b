"""Sharded calls: the way from the public functions to `flashtile.distributed`."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from .. import private_torch
from ..dynamo import untraced

KEY = "flashtile.context_parallel"  # of a thread's context

contexts_open = False  # in any thread of the process
_count = 0
_lock = threading.Lock()


@contextmanager
def inside(context: Any) -> Iterator[None]:
    """Make `context` that of this thread, and of the backward passes that it starts. `None` is no context."""
    global contexts_open, _count
    outer = current()
    private_torch.stash_in_thread(KEY, context)
    with _lock:
        _count += 1
        contexts_open = True
    try:
        yield
    finally:
        private_torch.stash_in_thread(KEY, outer)
        with _lock:
            _count -= 1
            contexts_open = _count > 0


def current() -> Any:
    """This thread's context, or `None`."""
    return private_torch.stashed_in_thread(KEY) if contexts_open else None


@untraced
def run_sharded(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of a public function whose call is in a context or has DTensors; `NotImplemented` of another."""
    context = current()
    if context is None and not is_dtensor(args[0] if args else kwargs.get("q")):
        return NotImplemented
    module = import_module("flashtile.distributed.context")  # by name, as it is a layer above
    return module.run_public(function.__name__, args, kwargs, context)


def is_dtensor(x: Any) -> bool:
    """Whether this is a DTensor. There is none before PyTorch's module is imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)
