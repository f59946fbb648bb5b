"""Kernel launches, and steps that repeat them.

A kernel has some sixty arguments, and Triton inspects each before a launch to find what it has compiled for them. After
the first launch the compiled kernel and its scalar arguments are known, and only addresses are new.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.runtime import driver  # pyright: ignore[reportMissingImports]

from .installed import triton_version
from .pointers import Slots, resolved

KNOWN_LAUNCHER = (3, 6)  # the version of Triton that `launcher` is for
# Products and sums become one instruction. Triton 3.9 warns where this is left to its default, which 3.10 changes.
OPTIONS = {"enable_fp_fusion": True}

Step = Callable[[list[Tensor | None]], None]  # of a recording, on its tensors


class TritonLaunch:
    """A compiled kernel with its arguments, launched by Triton."""

    def __init__(self, compiled: Any, programs: int, arguments: dict[str, Any], slots: Slots):
        self.run = compiled[(programs, 1, 1)]
        self.slots = [(n, slot) for n, name in enumerate(arguments) if (slot := slots.get(name)) is not None]
        self.arguments = list(arguments.values())
        for n, _ in self.slots:
            self.arguments[n] = None  # tensors are not kept alive

    def __call__(self, tensors: list[Tensor | None]) -> None:
        arguments = self.arguments.copy()
        for n, slot in self.slots:
            arguments[n] = slot.resolve(tensors)
        self.run(*arguments)


def launch(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> None:
    """Launch `kernel` on the current device and stream; `scalars` are its arguments that are no pointers."""
    kernel[(programs,)](**scalars, **resolved(slots, tensors), **OPTIONS)


def replayable(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> Step:
    """As `launch`; returns the step that repeats it for other tensors with the same layouts."""
    pointers = resolved(slots, tensors)
    compiled = kernel[(programs,)](**scalars, **pointers, **OPTIONS)
    if compiled is None:  # Triton's interpreter compiles nothing
        return lambda tensors: launch(kernel, programs, scalars, slots, tensors)
    named = scalars | pointers
    arguments = {name: named.get(name) for name in kernel.arg_names}
    by_triton = TritonLaunch(compiled, programs, arguments, slots)
    if triton_version() != KNOWN_LAUNCHER:
        return by_triton
    from . import launcher

    return launcher.of(compiled, programs, arguments, slots, by_triton) or by_triton


def current_stream() -> int:
    """The current stream of the current device, as an integer."""
    active: Any = driver.active
    return active.get_current_stream(active.get_current_device())
