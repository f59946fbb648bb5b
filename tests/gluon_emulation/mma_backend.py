"""The Triton backend with the kernels of mma.sync on the emulation: `emulated` substitutes it for the one on a GPU."""

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor

from flashtile.backend.gpu import replay
from flashtile.backend.gpu.kernel import function_under_jit
from flashtile.backend.gpu.pointers import Slots, resolved
from flashtile.backend.gpu.step import Step
from flashtile.backend.triton import support
from flashtile.backend.triton.tile_config import TileConfig
from flashtile.call.device import Device
from flashtile.call.plan import Candidate
from flashtile.dispatch import fast_path, passes, planner
from flashtile.dispatch.passes import entry_of

from . import package, triton_language
from .machine import Machine
from .package import arguments_of, imported

FOLDER = Path(str(support.__file__)).parent
DEVICE = Device("cuda", "emulated", "sm_80", 3)
copy_with_mistake = functools.partial(package.copy_with_mistake, FOLDER)


@functools.cache
def emulated_kernels(folder: Path = FOLDER) -> ModuleType:
    """`backend.triton.entry` of the package in a folder, imported on the emulation."""
    name = "flashtile.backend.triton_emulated" + (f"_in_{folder.name}" if folder != FOLDER else "")
    entry = imported(name, folder)
    for other, module in list(sys.modules.items()):
        if other.startswith(f"{name}.kernels") and other != f"{name}.kernels.kernel":  # that makes their source
            vars(module)["range"] = triton_language.range
    return entry


@contextmanager
def emulated(tile: TileConfig, seed: int = 0, folder: Path = FOLDER) -> Iterator[list[str]]:
    """Let `backend="triton"` take CPU tensors and run with these tiles on an emulated GPU.

    The seed decides the order of events. Yields the names of the modules and kernels launched.
    """
    kernels = emulated_kernels(folder)
    launched: list[str] = []

    def launch(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> None:
        kernel = function_under_jit(kernel)
        arguments = arguments_of(kernel, scalars | resolved(slots, tensors))
        arguments.pop("num_stages", None)
        launched.append(kernel.__module__.rpartition("kernels.")[2])
        Machine(seed + len(launched)).run(kernel, programs, arguments)

    def chosen(*_: Any) -> list[Candidate]:
        return [Candidate(tile, 1, 0.0)]

    def replayable(*given: Any) -> Step:
        launch(*given)
        return lambda tensors: launch(*given[:-1], tensors)

    with (
        mock.patch.multiple(replay, launch=launch, replayable=replayable),
        mock.patch.object(planner, "describe_device", return_value=DEVICE),
        mock.patch.object(passes, "entry_of", lambda name: kernels if name == "triton" else entry_of(name)),
        mock.patch.multiple(support, unusable=lambda: None, candidates=chosen, tangent_candidates=chosen),
    ):
        fast_path.forget()
        try:
            yield launched
        finally:
            fast_path.forget()
