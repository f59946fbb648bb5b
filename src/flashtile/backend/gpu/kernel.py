"""Kernels by name, so that host code imports Triton only where a kernel has to be compiled."""

import functools
import importlib
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """A kernel: its module, and its name there."""

    module: str
    name: str

    @property
    def title(self) -> str:
        """Name in an archive: "hopper.kernels.preprocess:preprocess_kernel"."""
        return f"{self.module.split('.backend.', 1)[-1]}:{self.name}"

    @property
    def backend(self) -> str:
        return self.title.split(".")[0]

    def function(self) -> Any:
        """The function under `triton.jit`."""
        return function_of(self)


@functools.cache
def function_of(kernel: Kernel) -> Any:
    return getattr(importlib.import_module(kernel.module), kernel.name)


def function_under_jit(kernel: Any) -> Any:
    """The function of a kernel; one that was made for a formula is itself."""
    return kernel.function() if isinstance(kernel, Kernel) else kernel
