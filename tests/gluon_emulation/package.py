"""A backend's package, imported a second time on the emulation, and the arguments of its kernels."""

import functools
import importlib
import importlib.util
import inspect
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from mistakes import with_mistake
from torch import Tensor

from flashtile.backend.gpu.pointers import TmaDescriptor

from . import ampere, hopper, language, triton_language
from .values import Boxes, Pointer, Shared, Value, as_tensor


class Semantic:
    """The part of Triton's compiler that kernels call directly."""

    def memdesc_reinterpret(self, memory: Shared, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Boxes:
        boxes = Boxes.of(memory, shape) if dtype == memory.dtype else None
        return memory.reinterpret(dtype, shape) if boxes is None else boxes


def builtin(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, _semantic=Semantic())


def jit(function: Any = None, **options: Any) -> Any:
    if function is None:
        return jit
    function.fn = function
    return function


def constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember results for plain arguments: most are the text of long assembly."""
    remembered = functools.lru_cache(None, typed=True)(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        plain = not named and all(type(x) in (str, int, bool) for x in args)
        return remembered(*args) if plain else function(*args, **named)

    return call


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
        "triton": module("triton", jit=jit, constexpr_function=constexpr_function, language=triton_language),
        "triton.language": triton_language,
        "triton._C": module("triton._C"),
        "triton._C.libtriton": module("triton._C.libtriton", ir=None),
        "triton.experimental": module("triton.experimental"),
        gluon: module(gluon, jit=jit, constexpr_function=lambda f: f, language=language),
        f"{gluon}._runtime": module(f"{gluon}._runtime", GluonJITFunction=type("GluonJITFunction", (), {})),
        f"{gluon}.language": module(f"{gluon}.language", **of_language, _core=core),
        f"{gluon}.language._core": core,
        f"{gluon}.language.nvidia": module(f"{gluon}.language.nvidia"),
        f"{gluon}.language.nvidia.ampere": ampere,
        f"{gluon}.language.nvidia.hopper": hopper,
        f"{gluon}.nvidia": module(f"{gluon}.nvidia"),
        f"{gluon}.nvidia.hopper": hopper,
    }


def imported(name: str, folder: Path) -> ModuleType:
    """The module `entry` of the package in a folder, imported as `name`, with all launch code and kernels."""
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
        # What it shares with the package itself stays too: a second copy would have other classes.
        loaded = {other: module for other, module in sys.modules.items() if other.startswith("flashtile.")}
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


def arguments_of(kernel: Callable[..., None], values: dict[str, Any]) -> dict[str, Any]:
    """A kernel's view of the arguments of a launch."""
    parameters = inspect.signature(kernel).parameters.items()
    constants = [name for name, parameter in parameters if parameter.annotation is language.constexpr]
    return {name: x if name in constants else kernel_argument(x) for name, x in values.items() if name != "num_warps"}


def copy_with_mistake(original: Path, folder: Path, file: str | None, *mistake: str) -> None:
    """Copy a backend's package into a folder; `mistake`: its name, the text in one file, and what replaces it."""
    shutil.copytree(original, folder)  # with bytecode, which is for the time of its source
    if file is not None:
        path = folder / file
        path.write_text(with_mistake(path.read_text(), *mistake))
        shutil.rmtree(path.parent / "__pycache__", ignore_errors=True)  # that time may be now
