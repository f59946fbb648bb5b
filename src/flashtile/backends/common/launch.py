"""Launching a kernel, and launching it again: what follows from shapes and settings is worked out once.

A kernel has some sixty arguments, and Triton looks at each before a launch to find what it has compiled for them. Calls
repeat: for a signature seen before, the compiled kernel and all its numbers are known, and only addresses are new.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver  # pyright: ignore[reportMissingImports]

from ...remember import remember
from .installed import triton_version
from .pointers import Pointers, taken

MOST_PREPARED = 4096
KNOWN_LAUNCHER = (3, 6)  # the version of Triton that `launcher` is for
HERE = nullcontext()

Prepared = Callable[[Pointers], None]


class Runner:
    """A compiled kernel with the arguments of one signature, launched by Triton."""

    def __init__(self, compiled: Any, programs: int, arguments: dict[str, Any], pointers: Pointers):
        self.run = compiled[(programs, 1, 1)]
        self.pointers = [(n, name) for n, name in enumerate(arguments) if pointers.get(name) is not None]
        self.arguments = list(arguments.values())
        for n, _ in self.pointers:
            self.arguments[n] = None  # tensors are not kept alive

    def __call__(self, pointers: Pointers) -> None:
        arguments = self.arguments.copy()
        for n, name in self.pointers:
            arguments[n] = taken(pointers[name])
        self.run(*arguments)


prepared: dict[Hashable, Prepared | None] = {}  # None: nothing to do


def launch(
    kernel: Any, signature: Hashable, pointers: Pointers, numbers: Callable[[], tuple[int, dict[str, Any]]]
) -> None:
    """Run `kernel` on the current device and stream. `numbers()` gives the programs and every argument that is no
    pointer; `signature` is what they depend on.
    """
    key = (kernel.fn.__name__, signature)
    if key not in prepared:
        prepare(key, kernel, pointers, *numbers())
    elif (known := prepared[key]) is not None:
        known(pointers)


def prepare(key: Hashable, kernel: Any, pointers: Pointers, programs: int, numbers: dict[str, Any]) -> None:
    """Launch a kernel for the first time, and remember how."""
    pointers = {name: taken(x) for name, x in pointers.items()}
    given = numbers | pointers
    compiled = kernel[(programs,)](**given) if programs > 0 else None
    if compiled is None and programs > 0:  # Triton's interpreter: nothing was compiled
        return
    known: Prepared | None = None
    if compiled is not None:
        arguments = {name: given.get(name) for name in kernel.arg_names}
        known = Runner(compiled, programs, arguments, pointers)
        if triton_version() == KNOWN_LAUNCHER:
            from . import launcher

            known = launcher.of(compiled, programs, arguments, pointers, known) or known
    remember(prepared, key, known, MOST_PREPARED)


def on_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device and its current stream."""
    if not x.is_cuda or torch.cuda.current_device() == x.get_device():
        return HERE
    return torch.cuda.device(x.device)


def current_stream() -> int:
    """Of the current device, as a number."""
    active: Any = driver.active
    return active.get_current_stream(active.get_current_device())
