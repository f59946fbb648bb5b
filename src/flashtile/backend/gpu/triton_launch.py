"""Launches of kernels that Triton compiles on the spot.

A kernel has some sixty arguments, and Triton inspects each before a launch to find what it has compiled for them. After
the first launch the compiled kernel and its scalar arguments are known, and only addresses are new.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from .installed import triton_version
from .kernel import function_under_jit
from .pointers import Slot, Slots, TmaDescriptor, resolved
from .step import Step

KNOWN_LAUNCHER = (3, 6)  # the version of Triton that `launcher` is for
# Products and sums become one instruction. Triton 3.9 warns where this is left to its default, which 3.10 changes.
OPTIONS = {"enable_fp_fusion": True}


class TritonLaunch:
    """A compiled kernel with its arguments, launched by Triton."""

    def __init__(self, compiled: Any, programs: int, arguments: dict[str, Any], slots: Slots):
        self.run = compiled[(programs, 1, 1)]
        self.slots = [(n, slot) for n, name in enumerate(arguments) if (slot := slots.get(name)) is not None]
        self.arguments = list(arguments.values())
        for n, _ in self.slots:
            self.arguments[n] = None  # tensors are not kept alive

    def __call__(self, tensors: list[Tensor | None]) -> None:
        arguments = self.arguments.copy()
        for n, slot in self.slots:
            arguments[n] = argument(slot, tensors)
        self.run(*arguments)


def launch(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> None:
    """Launch `kernel` on the current device and stream; `scalars` are its arguments that are no pointers."""
    function_under_jit(kernel)[(programs,)](**scalars, **pointers(slots, tensors), **OPTIONS)


def replayable(kernel: Any, programs: int, scalars: dict[str, Any], slots: Slots, tensors: list[Tensor | None]) -> Step:
    """As `launch`; returns the step that repeats it for other tensors with the same layouts."""
    function, given = function_under_jit(kernel), pointers(slots, tensors)
    compiled = function[(programs,)](**scalars, **given, **OPTIONS)
    if compiled is None:  # Triton's interpreter compiles nothing
        return lambda tensors: launch(kernel, programs, scalars, slots, tensors)
    named = scalars | given
    arguments = {name: named.get(name) for name in function.arg_names}
    by_triton = TritonLaunch(compiled, programs, arguments, slots)
    if triton_version() != KNOWN_LAUNCHER:
        return by_triton
    from . import launcher

    return launcher.of(compiled, programs, arguments, slots, by_triton) or by_triton


def pointers(slots: Slots, tensors: list[Tensor | None]) -> dict[str, Any]:
    return {name: for_triton(x) for name, x in resolved(slots, tensors).items()}


def argument(slot: Slot, tensors: list[Tensor | None]) -> Any:
    return for_triton(slot.resolve(tensors))


def for_triton(x: Any) -> Any:
    """A tensor as it is, a `TmaDescriptor` as Triton's."""
    if not isinstance(x, TmaDescriptor):
        return x
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # pyright: ignore[reportMissingImports]

    # Skips the constructor, whose checks take longer than the launch.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(
        base=x.base, shape=list(x.shape), strides=list(x.strides), block_shape=list(x.block_shape), padding=x.padding
    )
    descriptor.layout = layout_of(x.block_shape, x.base.dtype, x.swizzled)
    return descriptor


@functools.cache
def layout_of(box: tuple[int, ...], dtype: torch.dtype, swizzled: bool) -> Any:
    """The layout of a box in shared memory."""
    from triton.experimental.gluon import language as gl  # pyright: ignore[reportMissingImports]

    if not swizzled:
        return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8 * dtype.itemsize, rank=len(box))
    dtypes = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}
    dtypes |= {torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5, torch.int8: gl.int8}
    return gl.NVMMASharedLayout.get_default_for(list(box), dtypes[dtype])
