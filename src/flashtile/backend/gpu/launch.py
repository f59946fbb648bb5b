"""Launching a kernel, and launching it again: what follows from shapes and settings is worked out once.

A kernel has some sixty arguments, and Triton looks at each before a launch to find what it has compiled for them. After
the first launch the compiled kernel and all its numbers are known, and only addresses are new.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton.runtime import driver  # pyright: ignore[reportMissingImports]

from .installed import triton_version
from .pointers import Places

KNOWN_LAUNCHER = (3, 6)  # the version of Triton that `launcher` is for

Step = Callable[[list[Tensor | None]], None]  # of a pass, on its tensors


class Runner:
    """A compiled kernel with its arguments, launched by Triton."""

    def __init__(self, compiled: Any, programs: int, arguments: dict[str, Any], places: Places):
        self.run = compiled[(programs, 1, 1)]
        self.places = [(n, place) for n, name in enumerate(arguments) if (place := places.get(name)) is not None]
        self.arguments = list(arguments.values())
        for n, _ in self.places:
            self.arguments[n] = None  # tensors are not kept alive

    def __call__(self, tensors: list[Tensor | None]) -> None:
        arguments = self.arguments.copy()
        for n, place in self.places:
            arguments[n] = place.taken(tensors)
        self.run(*arguments)


class Interpreted:
    """A kernel that Triton's interpreter runs: nothing is compiled."""

    def __init__(self, kernel: Any, programs: int, scalars: dict[str, Any], places: Places):
        self.run, self.scalars, self.places = kernel[(programs,)], scalars, places

    def __call__(self, tensors: list[Tensor | None]) -> None:
        self.run(**self.scalars, **taken(self.places, tensors))


def taken(places: Places, tensors: list[Tensor | None]) -> dict[str, Any]:
    return {name: None if place is None else place.taken(tensors) for name, place in places.items()}


def launch(kernel: Any, programs: int, scalars: dict[str, Any], places: Places, tensors: list[Tensor | None]) -> Step:
    """Run `kernel` on the current device and stream for the first time; how to run it again on other tensors.

    `scalars` are its arguments that are no pointers.
    """
    pointers = taken(places, tensors)
    given = scalars | pointers
    compiled = kernel[(programs,)](**given)
    if compiled is None:
        return Interpreted(kernel, programs, scalars, places)
    arguments = {name: given.get(name) for name in kernel.arg_names}
    runner = Runner(compiled, programs, arguments, places)
    if triton_version() != KNOWN_LAUNCHER:
        return runner
    from . import launcher

    return launcher.of(compiled, programs, arguments, places, pointers, runner) or runner


def current_stream() -> int:
    """Of the current device, as a number."""
    active: Any = driver.active
    return active.get_current_stream(active.get_current_device())
