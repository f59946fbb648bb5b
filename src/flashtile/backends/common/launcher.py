"""The C function with which Triton 3.6 launches a kernel on an NVIDIA GPU, called without what Triton has around it.

Triton asks each tensor for its address and the driver what it is, describes tensors to the copy engine anew, and tells
hooks: together longer than a launch. Here addresses are numbers, and what the copy engine was told is kept by address.
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
from .pointers import Pointers, taken

MOST_ADDRESSES = 256
STREAM = 3  # its place among the arguments


def of(
    compiled: Any, programs: int, arguments: dict[str, Any], pointers: Pointers, runner: Callable[..., None]
) -> Callable[..., None] | None:
    """How to launch a compiled kernel again with other tensors; `None` where Triton does it."""
    run = compiled.run
    if type(run) is not CudaLauncher or run.global_scratch_size > 0 or run.profile_scratch_size > 0:
        return None
    descriptors = [name for name, x in pointers.items() if x is not None and not isinstance(x, Tensor)]
    if not descriptors:
        return Launcher(run.launch, compiled, programs, arguments, pointers, runner)
    if len(compiled.metadata.tensordesc_meta or ()) != len(descriptors):  # they are pointers in this kernel
        return None
    c_function = inspect.getclosurevars(run.launch).nonlocals["launcher"]  # around it is what expands descriptors
    return Launcher(c_function, compiled, programs, arguments, pointers, runner)


class Launcher:
    """A compiled kernel with the arguments of one signature."""

    def __init__(
        self,
        launch: Any,
        compiled: Any,
        programs: int,
        arguments: dict[str, Any],
        pointers: Pointers,
        runner: Callable[..., None],
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
        self.tensors: list[tuple[int, str]] = []
        self.described: list[tuple[int, str, Any, dict[int, Any]]] = []
        layouts = iter(compiled.metadata.tensordesc_meta or ())
        for name, x in arguments.items():
            here = len(self.arguments)
            if pointers.get(name) is None:
                self.arguments.append(x)
            elif isinstance(x, Tensor):
                self.tensors.append((here, name))
                self.arguments.append(None)
            else:
                self.described.append((here, name, next(layouts), {}))
                self.arguments += [None, *x.shape, *x.strides]

    def __call__(self, pointers: Pointers) -> None:
        hooks = knobs.runtime
        if asked(hooks.launch_enter_hook) or asked(hooks.launch_exit_hook):
            self.runner(pointers)
            return
        arguments = self.arguments.copy()
        arguments[STREAM] = self.driver.get_current_stream(self.device)
        for n, name in self.tensors:
            arguments[n] = pointers[name].data_ptr()  # type: ignore[union-attr]
        for n, name, layout, known in self.described:
            x: Any = pointers[name]
            address = x.base.data_ptr()
            map_ = known.get(address)
            if map_ is None:
                map_ = remember(known, address, described(x, layout), MOST_ADDRESSES)
            arguments[n] = map_
        self.launch(*arguments)


def asked(hook: Any) -> bool:
    """Whether a hook is a function, or a chain of some."""
    return hook is not None and bool(getattr(hook, "calls", True))


def described(x: Any, layout: Any) -> Any:
    """A tensor as the copy engine knows it: 128 bytes that hold its address, its shape and its strides."""
    return make_tensordesc_arg(taken(x), layout)[0]
