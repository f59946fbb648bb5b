"""Kernel launches, and steps that repeat them: from an archive of compiled kernels, else compiled by Triton."""

from typing import Any

from torch import Tensor

from . import archive
from .binary import BinaryLaunch
from .driver import NotRunnableError
from .pointers import Slots
from .step import Step


def launch(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> None:
    """Launch `kernel` on the current device and stream; `scalars` are its arguments that are no pointers."""
    step = of_archive(kernel, programs, scalars, slots, tensors)
    if step is not None:
        step(tensors)
        return
    from . import triton_launch  # imports Triton

    triton_launch.launch(kernel, programs, scalars, slots, tensors)


def replayable(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> Step:
    """As `launch`; returns the step that repeats it for other tensors with the same layouts."""
    step = of_archive(kernel, programs, scalars, slots, tensors)
    if step is not None:
        step(tensors)
        return step
    from . import triton_launch

    return triton_launch.replayable(kernel, programs, scalars, slots, tensors)


def of_archive(
    kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]
) -> BinaryLaunch | None:
    """The launch of a compiled kernel; `None` without one that runs here."""
    found = archive.find(kernel, scalars, slots, tensors)
    if found is None:
        return None
    whole, binary = found
    try:
        return BinaryLaunch(binary, programs, scalars, slots, tensors)
    except (OSError, ValueError, NotRunnableError) as error:
        archive.give_up(whole, error)
        return None
