"""Machine code of kernels: compiled ahead, where the archive has it, else by LLVM at the first use (`jit`).

The archive wins over the cache of compiled kernels, so that results do not depend on what is in the cache.
"""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from ..compiling import expected
from . import archive
from .targets import Target
from .variant import BACKWARD, FORWARD, TABLE, TANGENTS

if TYPE_CHECKING:
    from .kernels.codegen import Source


class CpuKernel(NamedTuple):
    """A kernel by everything that determines its code."""

    name: str
    variant: Any
    target: Target


_collected: ContextVar[set[CpuKernel] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collected_kernels() -> Iterator[set[CpuKernel]]:
    """Inside, kernels are collected: none is compiled, and none runs."""
    found: set[CpuKernel] = set()
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def function_address(name: str, variant: Any, target: Target) -> int:
    """The address of the kernel `name` of a variant; 0 where kernels are collected."""
    if (collected := _collected.get()) is None:
        return loaded(name, variant, target)
    collected.add(CpuKernel(name, variant, target))
    return 0


@functools.lru_cache(maxsize=1024)
def loaded(name: str, variant: Any, target: Target) -> int:
    address = archive.find(name, variant, target)
    if address is None:
        from . import jit

        def others() -> Iterator[jit.KernelSource]:
            for kernel in expected():
                if archive.find(*kernel) is None:
                    yield jit.KernelSource(*kernel, source=functools.partial(source_of, *kernel))

        source = functools.partial(source_of, name, variant, target)
        address = jit.function_address(name, variant, target, source, others)
    return address


def source_of(name: str, variant: Any, target: Target) -> "Source":
    """The IR of a kernel. Its generator is imported here, as no other kernel needs it."""
    if name == TABLE:
        from .kernels import distance_table

        return distance_table.source(variant, target)
    if name == BACKWARD:
        from .kernels import backward

        return backward.source(variant, target)
    if name == TANGENTS:
        from .kernels import tangents

        return tangents.source(variant, target)
    assert name == FORWARD
    from .kernels import decode, forward, row_values, tile_forward

    kernel = row_values.RowValuesKernel if variant.row_values else forward.ForwardKernel
    kernel = decode.DecodeKernel if variant.decode else kernel
    return forward.source(variant, target, tile_forward.TileKernel if variant.tiles else kernel)
