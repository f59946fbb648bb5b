"""Launching a kernel, and launching it again: what follows from shapes and settings is worked out once.

A kernel has some sixty arguments, and Triton looks at each before a launch to find what it has compiled for them. Calls
repeat: for a signature seen before, the compiled kernel and all its numbers are known, and only pointers are new.
"""

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...remember import remember

MOST_PREPARED = 4096

Pointers = Mapping[str, Tensor | Any | None]  # tensors, or descriptors of tensors


class Prepared:
    """A compiled kernel with the arguments of one signature."""

    def __init__(self, compiled: Any, programs: int, names: list[str], arguments: dict[str, Any], pointers: Pointers):
        self.run = compiled[(programs, 1, 1)]
        self.pointers = [(n, name) for n, name in enumerate(names) if pointers.get(name) is not None]
        self.arguments = [arguments.get(name) for name in names]
        for n, _ in self.pointers:
            self.arguments[n] = None  # tensors are not kept alive

    def launch(self, pointers: Pointers) -> None:
        arguments = self.arguments.copy()
        for n, name in self.pointers:
            arguments[n] = pointers[name]
        self.run(*arguments)


prepared: dict[Hashable, Prepared | None] = {}


def launch(
    kernel: Any, signature: Hashable, pointers: Pointers, numbers: Callable[[], tuple[int, dict[str, Any]]]
) -> None:
    """Run `kernel` on the current device and stream. `numbers()` gives the programs and every argument that is no
    pointer; `signature` is what they depend on.
    """
    key = (kernel.fn.__name__, signature)
    if key in prepared:
        known = prepared[key]
        if known is not None:
            known.launch(pointers)
        return
    programs, arguments = numbers()
    arguments = {**arguments, **pointers}
    compiled = kernel[(programs,)](**arguments) if programs > 0 else None
    if compiled is None and programs > 0:  # Triton's interpreter: nothing was compiled
        return
    known = None if compiled is None else Prepared(compiled, programs, kernel.arg_names, arguments, pointers)
    remember(prepared, key, known, MOST_PREPARED)


def on_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device and its current stream."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else nullcontext()
