"""The C function with which Triton 3.6 launches a kernel on an NVIDIA GPU, called without what Triton has around it.

Triton asks each tensor for its address and the driver what it is, describes tensors to the copy engine anew, and tells
hooks: together longer than a launch. Here addresses are scalars, and what the copy engine was told is kept by address.
With hooks (a profiler), and with any other version of Triton, kernels are launched by Triton as usual.
"""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from triton import knobs  # pyright: ignore[reportAttributeAccessIssue]
from triton.backends.nvidia.driver import (  # pyright: ignore[reportMissingImports]
    CudaLauncher,
    make_tensordesc_arg,
)
from triton.runtime import driver  # pyright: ignore[reportMissingImports]

from ...remember import remember
from .pointers import Place, Places

MOST_ADDRESSES = 256
STREAM = 3  # its place among the arguments


def of(
    compiled: Any,
    programs: int,
    arguments: dict[str, Any],
    places: Places,
    pointers: dict[str, Any],
    runner: Callable[[list[Tensor | None]], None],
) -> Callable[[list[Tensor | None]], None] | None:
    """How to launch a compiled kernel again with other tensors; `None` where Triton does it. `pointers` are what the
    first launch took for `places`.
    """
    run = compiled.run
    if type(run) is not CudaLauncher or run.global_scratch_size > 0 or run.profile_scratch_size > 0:
        return None
    descriptors = [name for name, x in pointers.items() if x is not None and not isinstance(x, Tensor)]
    if not descriptors:
        return Launcher(run.launch, compiled, programs, arguments, places, runner)
    if len(compiled.metadata.tensordesc_meta or ()) != len(descriptors):  # they are pointers in this kernel
        return None
    c_function = inspect.getclosurevars(run.launch).nonlocals["launcher"]  # around it is what expands descriptors
    return Launcher(c_function, compiled, programs, arguments, places, runner)


class Launcher:
    """A compiled kernel with the arguments of one signature."""

    def __init__(
        self,
        launch: Any,
        compiled: Any,
        programs: int,
        arguments: dict[str, Any],
        places: Places,
        runner: Callable[[list[Tensor | None]], None],
    ):
        self.launch, self.runner = launch, runner
        self.driver: Any = driver.active
        self.device = self.driver.get_current_device()
        run = compiled.run
        self.arguments: list[Any] = [
            programs, 1, 1, None, compiled.function, run.launch_cooperative_grid, run.launch_pdl,
            None, None,  # no scratch memory
            compiled.packed_metadata, None, None, None,  # no hooks
        ]  # fmt: skip
        self.tensors: list[tuple[int, int]] = []
        self.described: list[tuple[int, int, Place, Any, dict[int, Any]]] = []
        layouts = iter(compiled.metadata.tensordesc_meta or ())
        for name, x in arguments.items():
            here = len(self.arguments)
            place = places.get(name)
            if place is None:
                self.arguments.append(x)
            elif isinstance(x, Tensor):
                self.tensors.append((here, place.number))
                self.arguments.append(None)
            else:
                self.described.append((here, place.number, place, next(layouts), {}))
                self.arguments += [None, *x.shape, *x.strides]

    def __call__(self, tensors: list[Tensor | None]) -> None:
        hooks = knobs.runtime
        if asked(hooks.launch_enter_hook) or asked(hooks.launch_exit_hook):
            self.runner(tensors)
            return
        arguments = self.arguments.copy()
        arguments[STREAM] = self.driver.get_current_stream(self.device)
        for n, number in self.tensors:
            arguments[n] = tensors[number].data_ptr()  # type: ignore[union-attr]
        for n, number, place, layout, known in self.described:
            address = tensors[number].data_ptr()  # type: ignore[union-attr]
            map_ = known.get(address)
            if map_ is None:
                map_ = remember(known, address, make_tensordesc_arg(place.taken(tensors), layout)[0], MOST_ADDRESSES)
            arguments[n] = map_
        self.launch(*arguments)


def asked(hook: Any) -> bool:
    """Whether a hook is a function, or a chain of some."""
    return hook is not None and bool(getattr(hook, "calls", True))
