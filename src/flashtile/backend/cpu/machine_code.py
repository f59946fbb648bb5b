"""Machine code of kernels, which LLVM makes at their first use (`jit`)."""

from collections.abc import Callable
from typing import Any

from .targets import Target


def function_address(name: str, variant: Any, target: Target, source: Callable[[], Any]) -> int:
    """The address of the kernel `name` of a variant; `source` generates its IR where it has to be compiled."""
    from . import jit

    return jit.function_address(name, variant, target, source)
