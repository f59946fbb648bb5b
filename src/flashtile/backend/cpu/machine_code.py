"""Machine code of kernels: compiled ahead, where the archive has it, else by LLVM at the first use (`jit`).

The archive wins over the cache of compiled kernels, so that results do not depend on what is in the cache.
"""

import functools
from typing import TYPE_CHECKING, Any

from . import archive
from .targets import Target
from .variant import BACKWARD, FORWARD, TABLE

if TYPE_CHECKING:
    from .kernels.codegen import Source


@functools.lru_cache(maxsize=1024)
def function_address(name: str, variant: Any, target: Target) -> int:
    """The address of the kernel `name` of a variant."""
    address = archive.find(name, variant, target)
    if address is None:
        from . import jit

        address = jit.function_address(name, variant, target, lambda: source_of(name, variant, target))
    return address


def source_of(name: str, variant: Any, target: Target) -> "Source":
    """The IR of a kernel. Its generator is imported here, as no other kernel needs it."""
    if name == TABLE:
        from .kernels import distance_table

        return distance_table.source(variant, target)
    if name == BACKWARD:
        from .kernels import backward

        return backward.source(variant, target)
    assert name == FORWARD
    from .kernels import decode, forward, row_values, tile_forward

    kernel = row_values.RowValuesKernel if variant.row_values else forward.ForwardKernel
    kernel = decode.DecodeKernel if variant.decode else kernel
    return forward.source(variant, target, tile_forward.TileKernel if variant.tiles else kernel)
