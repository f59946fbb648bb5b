"""The Hopper backend on the emulation: `emulated` substitutes it for the one on a GPU."""

import functools
import importlib
import importlib.util
import inspect
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from forced import in_order
from seeded_bugs import with_mistake
from torch import Tensor

from flashtile.backend.gpu import cost, replay
from flashtile.backend.gpu.kernel import function_under_jit
from flashtile.backend.gpu.pointers import Slots, TmaDescriptor, resolved
from flashtile.backend.gpu.step import Step
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import candidates
from flashtile.call.device import Device
from flashtile.dispatch import fast_path, passes, planner
from flashtile.dispatch.passes import entry_of

from . import hopper, language
from .machine import Machine
from .values import Boxes, Pointer, Shared, Value, as_tensor


class Semantic:
    """The part of Triton's compiler that kernels call directly."""

    def memdesc_reinterpret(self, memory: Shared, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Boxes:
        boxes = Boxes.of(memory, shape) if dtype == memory.dtype else None
        return memory.reinterpret(dtype, shape) if boxes is None else boxes


def builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, _semantic=Semantic())


def jit(function: Any = None, **options: Any) -> Any:
    return function if function is not None else jit


def triton_modules() -> dict[str, ModuleType]:
    """Substitutes for the modules that the kernels import, by name."""

    def module(name: str, **attributes: Any) -> ModuleType:
        substitute = ModuleType(name)
        vars(substitute).update(attributes)
        return substitute

    gluon = "triton.experimental.gluon"
    core = module("_core", builtin=builtin, tuple=list, _unwrap_if_constexpr=lambda x: x)
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
    """`backend.hopper.entry` of the package in a folder, imported on the emulation."""
    name = "flashtile.backend.hopper_emulated" + (f"_in_{folder.name}" if folder != FOLDER else "")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    with mock.patch.dict(sys.modules, triton_modules()):
        sys.modules[name] = importlib.util.module_from_spec(spec)
        entry = importlib.import_module(f"{name}.entry")
        importlib.import_module(f"{name}.launch.backward")
        for source in sorted((folder / "kernels").rglob("*.py")):
            importlib.import_module(".".join((name, *source.relative_to(folder).with_suffix("").parts)))
        loaded = {other: module for other, module in sys.modules.items() if other.startswith(name)}
    sys.modules.update(loaded)
    return entry


def kernel_argument(x: Any) -> Any:
    """A kernel's view of an argument."""
    if isinstance(x, Tensor):
        return Pointer(x)
    if isinstance(x, TmaDescriptor):
        descriptor = hopper.TensorDescriptor()
        vars(descriptor).update(base=x.base, shape=x.shape, strides=x.strides, block_shape=x.block_shape)
        descriptor.layout = None
        return descriptor
    return Value(as_tensor(x)) if isinstance(x, bool | int | float) else x


def copy_with_mistake(folder: Path, file: str | None, *mistake: str) -> None:
    """Copy the backend's package into a folder; `mistake`: its name, the text in one file, and what replaces it."""
    shutil.copytree(FOLDER, folder)  # with bytecode, which is for the time of its source
    if file is not None:
        path = folder / file
        path.write_text(with_mistake(path.read_text(), *mistake))
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # that time may be now


@contextmanager
def emulated(cores: int = 3, seed: int = 0, folder: Path = FOLDER) -> Iterator[list[str]]:
    """Let `backend="hopper"` take CPU tensors and run on an emulated GPU with `cores` SMs.

    The seed decides the order of events. Plans are the first of the tables. Yields the names of the kernels launched.
    """
    kernels = emulated_kernels(folder)
    forward, backward_launches, float32 = (
        sys.modules[f"{kernels.__package__}.launch.{name}"] for name in ("forward", "backward_launches", "float32")
    )
    device = Device("cuda", "emulated", support.ARCHITECTURE, cores)
    launched: list[str] = []
    controls: list[str] = []  # of the last kernel's programs
    semaphore = torch.zeros(1, dtype=torch.int32)  # shared by dense launches, as on a GPU

    def semaphore_of(device: torch.device, packed: bool) -> Tensor:
        return torch.zeros(1, dtype=torch.int32) if packed else semaphore

    def launch(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> None:
        kernel = function_under_jit(kernel)
        parameters = inspect.signature(kernel).parameters.items()
        constants = [name for name, parameter in parameters if parameter.annotation is language.constexpr]
        values = scalars | resolved(slots, tensors)
        arguments = {name: x if name in constants else kernel_argument(x) for name, x in values.items()}
        del arguments["num_warps"]
        arguments.pop("maxnreg", None)
        dependent = arguments.pop("launch_pdl", False)
        launched.append(kernel.__name__)
        machine = Machine(seed + len(launched))
        machine.run(kernel, programs, arguments)
        if dependent:  # here it runs behind the kernel before, which a GPU does not promise
            # Others wait for the kernel before at their begin, also for one that lets none begin.
            early = kernel.__name__ == "dkdv_kernel"
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
