"""The decorator of the kernels, and the types of their parameters (`backend.gpu.grouped`)."""

from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon

from ...gpu import grouped
from ...gpu.grouped import Captured, Language, with_captured

__all__ = ["Captured", "Pointer", "Scalar", "gluon_kernel", "kernel", "with_captured"]

Pointer, Scalar = tl.pointer_type, tl.tensor
TRITON, GLUON = (Language(jit, Pointer, Scalar, tl.constexpr) for jit in (triton.jit, gluon.jit))


def kernel(function: Any) -> Any:
    """Make the kernel to launch of a function whose parameters are grouped in NamedTuples."""
    return grouped.kernel(function, TRITON)


def gluon_kernel(function: Any) -> Any:
    """As `kernel`, of a function in Gluon."""
    return grouped.kernel(function, GLUON)
