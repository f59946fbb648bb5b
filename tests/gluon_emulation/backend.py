"""The Hopper backend on the emulation: `emulated` puts it in the place of the one on a GPU."""

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from flashtile.backend.gpu import replay
from flashtile.backend.gpu.launch import Step, taken
from flashtile.backend.gpu.pointers import Places
from flashtile.backend.hopper import support
from flashtile.call.device import Device
from flashtile.dispatch import operators, planner

from . import hopper, language
from .machine import Machine
from .values import Pointer, Shared, Value, as_tensor


class Semantic:
    """Of Triton's compiler, what kernels ask directly."""

    def memdesc_reinterpret(self, memory: Shared, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return memory.reinterpreted(dtype, shape)


def builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, _semantic=Semantic())


def jit(function: Any = None, **options: Any) -> Any:
    return function if function is not None else jit


def in_place_of_triton() -> dict[str, ModuleType]:
    """Modules by the names under which the kernels import them."""

    def module(name: str, **attributes: Any) -> ModuleType:
        found = ModuleType(name)
        vars(found).update(attributes)
        return found

    gluon = "triton.experimental.gluon"
    core = module("_core", builtin=builtin, _unwrap_if_constexpr=lambda x: x)
    of_language = {name: x for name, x in vars(language).items() if not name.startswith("_")}
    return {
        "triton": module("triton", jit=jit, constexpr_function=lambda f: f, language=language),
        "triton.language": language,
        "triton._C": module("triton._C"),
        "triton._C.libtriton": module("triton._C.libtriton", ir=None),
        "triton.experimental": module("triton.experimental"),
        gluon: module(gluon, jit=jit, language=language),
        f"{gluon}.language": module(f"{gluon}.language", **of_language, _core=core),
        f"{gluon}.language._core": core,
        f"{gluon}.language.nvidia": module(f"{gluon}.language.nvidia"),
        f"{gluon}.language.nvidia.hopper": hopper,
        f"{gluon}.nvidia": module(f"{gluon}.nvidia"),
        f"{gluon}.nvidia.hopper": hopper,
    }


FOLDER = Path(str(support.__file__)).parent


@functools.cache
def emulated_kernels(folder: Path = FOLDER) -> ModuleType:
    """`backend.hopper.entry` of the package in a folder, imported with the emulation in the place of Triton."""
    name = "flashtile.backend.hopper_emulated" + (f"_in_{folder.name}" if folder != FOLDER else "")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    with mock.patch.dict(sys.modules, in_place_of_triton()):
        sys.modules[name] = importlib.util.module_from_spec(spec)
        found = importlib.import_module(f"{name}.entry")
        importlib.import_module(f"{name}.host_backward")
        loaded = {other: module for other, module in sys.modules.items() if other.startswith(name)}
    sys.modules.update(loaded)
    return found


def argument(x: Any) -> Any:
    """What a kernel gets."""
    if isinstance(x, Tensor):
        return Pointer(x)
    return Value(as_tensor(x)) if isinstance(x, bool | int | float) else x


@contextmanager
def emulated(cores: int = 3, seed: int = 0, folder: Path = FOLDER) -> Iterator[list[str]]:
    """`backend="hopper"` takes CPU tensors: its kernels run in the emulation of a GPU with so many cores. The seed
    decides in which order things happen. Gives the names of the kernels that are launched.
    """
    kernels = emulated_kernels(folder)
    backward_pass = sys.modules[f"{kernels.__package__}.backward_launches"]
    device = Device("cuda", "emulated", support.ARCHITECTURE, cores)
    launched: list[str] = []
    semaphore = torch.zeros(1, dtype=torch.int32)  # that dense launches share, as on a GPU

    def semaphore_of(device: torch.device, packed: bool) -> Tensor:
        return torch.zeros(1, dtype=torch.int32) if packed else semaphore

    def launch(
        kernel: Any, programs: int, numbers: dict[str, Any], places: Places, tensors: list[Tensor | None]
    ) -> Step:
        parameters = inspect.signature(kernel).parameters.items()
        constants = [name for name, parameter in parameters if parameter.annotation is language.constexpr]

        def step(tensors: list[Tensor | None]) -> None:
            inputs = numbers | taken(places, tensors)
            arguments = {name: x if name in constants else argument(x) for name, x in inputs.items()}
            del arguments["num_warps"]
            launched.append(kernel.__name__)
            Machine(seed + len(launched)).run(kernel, programs, arguments)

        step(tensors)
        return step

    with (
        mock.patch.multiple(replay, launch=launch, _PASSES={}),
        mock.patch.multiple(kernels, tile_count_semaphore=semaphore_of, describe_device=lambda _: device),
        mock.patch.multiple(backward_pass, tile_count_semaphore=semaphore_of, describe_device=lambda _: device),
        mock.patch.object(planner, "describe_device", return_value=device),
        mock.patch.object(operators, "entry_of", return_value=kernels),
        mock.patch.object(support, "unusable", return_value=None),
    ):
        planner.forget_plans()
        try:
            yield launched
        finally:
            planner.forget_plans()
