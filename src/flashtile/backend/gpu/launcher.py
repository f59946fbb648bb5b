"""Launches by Triton 3.6's C function on an NVIDIA GPU, without the Python that Triton has around it.

Triton asks each tensor for its address and the driver what it is, encodes tensor maps anew, and calls hooks: together
longer than a launch. Here addresses are integers, and tensor maps are cached by address. With hooks (a profiler), and
with any other version of Triton, Triton launches the kernels.
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
from .pointers import Slot, Slots, described_tensors
from .step import Step

MOST_ADDRESSES = 256
STREAM = 3  # the index of the stream among the arguments


def of(compiled: Any, programs: int, arguments: dict[str, Any], slots: Slots, by_triton: Step) -> Step | None:
    """Build the step that launches a compiled kernel for other tensors; `None` where only Triton can. `arguments` are
    its first launch's.
    """
    run = compiled.run
    if type(run) is not CudaLauncher or run.global_scratch_size > 0 or run.profile_scratch_size > 0:
        return None
    tensors = [arguments[name] for name, slot in slots.items() if slot is not None]
    descriptors = [x for x in tensors if not isinstance(x, Tensor)]
    if not descriptors:
        return Launcher(run.launch, compiled, programs, arguments, slots, by_triton)
    if len(compiled.metadata.tensordesc_meta or ()) != len(descriptors):  # they are pointers in this kernel
        return None
    c_function = inspect.getclosurevars(run.launch).nonlocals["launcher"]  # around it is what expands descriptors
    return Launcher(c_function, compiled, programs, arguments, slots, by_triton)


class Launcher:
    """A compiled kernel with the arguments of one layout."""

    def __init__(
        self, launch: Any, compiled: Any, programs: int, arguments: dict[str, Any], slots: Slots, by_triton: Step
    ):
        self.launch, self.by_triton = launch, by_triton
        active: Any = driver.active
        self.device: int = active.get_current_device()
        self.stream: Callable[[int], int] = active.get_current_stream
        run = compiled.run
        self.arguments: list[Any] = [
            programs, 1, 1, None, compiled.function, run.launch_cooperative_grid, run.launch_pdl,
            None, None,  # no scratch memory
            compiled.packed_metadata, None, None, None,  # no hooks
        ]  # fmt: skip
        self.pointers: list[tuple[int, int, int]] = []  # index of the argument, of the tensor, and bytes from there
        self.mapped = described_tensors(slots)  # indices of the tensors of tensor maps, and perhaps of others
        # Index of the argument, that of the tensor in `mapped`, bytes from there, and what makes the map.
        self.tensor_maps: list[tuple[int, int, int, Slot, Any, dict[int, Any]]] = []
        layouts = iter(compiled.metadata.tensordesc_meta or ())
        for name, x in arguments.items():
            here = len(self.arguments)
            slot = slots.get(name)
            if slot is None:
                self.arguments.append(x)
            elif isinstance(x, Tensor):
                self.pointers.append((here, slot.index, slot.offset))
                self.arguments.append(None)
            else:
                place = self.mapped.index(slot.index)
                self.tensor_maps.append((here, place, slot.offset, slot, next(layouts), {}))
                self.arguments += [None, *x.shape, *x.strides]
        self.last: tuple[list[int], list[Any]] = [], self.arguments  # addresses, and arguments with maps of these

    def __call__(self, tensors: list[Tensor | None]) -> None:
        if hooked():
            self.by_triton(tensors)
            return
        addresses, known = self.last  # at once, as other threads replace both
        if self.tensor_maps:
            now = [tensors[n].data_ptr() for n in self.mapped]  # type: ignore[union-attr]
            if now != addresses:
                known = self.with_maps(now, tensors)
        arguments = known.copy()
        arguments[STREAM] = self.stream(self.device)
        for n, index, offset in self.pointers:
            arguments[n] = tensors[index].data_ptr() + offset  # type: ignore[union-attr]
        self.launch(*arguments)

    def with_maps(self, addresses: list[int], tensors: list[Tensor | None]) -> list[Any]:
        """The arguments with maps of tensors at these addresses, which later launches begin with."""
        arguments = self.arguments.copy()
        for n, place, offset, slot, layout, by_address in self.tensor_maps:
            address = addresses[place] + offset
            tensor_map = by_address.get(address)
            if tensor_map is None:
                tensor_map = make_tensordesc_arg(slot.resolve(tensors), layout)[0]
                remember(by_address, address, tensor_map, MOST_ADDRESSES)
            arguments[n] = tensor_map
        self.last = addresses, arguments
        return arguments


def hooked() -> bool:
    """Whether a hook is a function, or a chain that is not empty."""
    hooks = knobs.runtime
    try:
        return bool(hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls)
    except AttributeError:  # no chain
        return True
