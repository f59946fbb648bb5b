"""The Hopper backend on the emulation: `emulated` substitutes it for the one on a GPU."""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from forced import in_order
from torch import Tensor

from flashtile.backend.gpu import cost, replay
from flashtile.backend.gpu.kernel import function_under_jit
from flashtile.backend.gpu.pointers import Slots, resolved
from flashtile.backend.gpu.step import Step
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import candidates
from flashtile.call.device import Device
from flashtile.dispatch import fast_path, passes, planner
from flashtile.dispatch.passes import entry_of

from . import package
from .machine import Machine
from .package import arguments_of, imported

FOLDER = Path(str(support.__file__)).parent
copy_with_mistake = functools.partial(package.copy_with_mistake, FOLDER)


@functools.cache
def emulated_kernels(folder: Path = FOLDER) -> ModuleType:
    """`backend.hopper.entry` of the package in a folder, imported on the emulation."""
    name = "flashtile.backend.hopper_emulated" + (f"_in_{folder.name}" if folder != FOLDER else "")
    return imported(name, folder)


@contextmanager
def emulated(cores: int = 3, seed: int = 0, folder: Path = FOLDER) -> Iterator[list[str]]:
    """Let `backend="hopper"` take CPU tensors and run on an emulated GPU with `cores` SMs.

    The seed decides the order of events. Plans are the first of the tables. Yields the names of the kernels launched.
    """
    kernels = emulated_kernels(folder)
    forward, tangents, backward_launches, float32 = (
        importlib.import_module(f"{kernels.__package__}.launch.{name}")
        for name in ("forward", "tangents", "backward_launches", "float32")
    )
    device = Device("cuda", "emulated", support.ARCHITECTURE, cores)
    launched: list[str] = []
    controls: list[str] = []  # of the last kernel's programs
    semaphore = torch.zeros(1, dtype=torch.int32)  # shared by dense launches, as on a GPU

    def semaphore_of(device: torch.device, packed: bool) -> Tensor:
        return torch.zeros(1, dtype=torch.int32) if packed else semaphore

    def launch(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> None:
        kernel = function_under_jit(kernel)
        arguments = arguments_of(kernel, scalars | resolved(slots, tensors))
        arguments.pop("maxnreg", None)
        dependent = arguments.pop("launch_pdl", False)
        launched.append(kernel.__name__)
        machine = Machine(seed + len(launched))
        machine.run(kernel, programs, arguments)
        if dependent:  # here it runs behind the kernel before, which a GPU does not promise
            # Others wait for the kernel before at their begin, also for one that lets none begin.
            early = kernel.__name__ in ("dkdv_kernel", "wide_dkdv_kernel")
            assert "griddepcontrol.launch_dependents" in controls or not early, "the kernel before lets none begin"
            waits = machine.grid_controls.count("griddepcontrol.wait")
            assert waits == programs, "it may be complete before that one"
        controls[:] = machine.grid_controls

    def replayable(*given: Any) -> Step:
        launch(*given)
        return lambda tensors: launch(*given[:-1], tensors)

    with (
        mock.patch.multiple(replay, launch=launch, replayable=replayable),
        mock.patch.multiple(forward, tile_count_semaphore=semaphore_of, describe_device=lambda _: device),
        mock.patch.multiple(float32, tile_count_semaphore=semaphore_of, describe_device=lambda _: device),
        mock.patch.multiple(tangents, tile_count_semaphore=semaphore_of, describe_device=lambda _: device),
        mock.patch.object(backward_launches, "describe_device", return_value=device),
        mock.patch.object(planner, "describe_device", return_value=device),
        mock.patch.object(passes, "entry_of", lambda name: kernels if name == "hopper" else entry_of(name)),
        mock.patch.multiple(support, unusable=lambda: None, unknown_kernels=lambda *_: None),  # no compiler is there
        mock.patch.object(candidates, "compiler_version", return_value=None),  # none spills registers
        mock.patch.object(cost, "ranked", in_order),  # the first kernels of the tables, unless a test chooses others
    ):
        fast_path.forget()
        try:
            yield launched
        finally:
            fast_path.forget()
