"""Gluon is an experimental part of Triton: what differs between the versions that this backend runs on stands here."""

import functools
import importlib.metadata
import inspect
from typing import Any

OLDEST, TOO_NEW = (3, 6), (3, 8)


@functools.cache
def unsupported() -> str | None:
    """Why the installed Triton cannot compile these kernels; `None` if it can."""
    try:
        text = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed (PyTorch's GPU builds bring it)"
    version = tuple(int(part) for part in text.split(".")[:2])
    if OLDEST <= version < TOO_NEW:
        return None
    return f"its Gluon kernels are for Triton {OLDEST[0]}.{OLDEST[1]} and 3.7; this is {text}"


TENSORS = {"lse", "slopes", "sinks", "counter"}  # of all kernels, beside descriptors


def is_tensor(name: str) -> bool:
    return name in TENSORS or name.endswith("_desc")


def kernel(function: Any) -> Any:
    """`gluon.jit` whose numbers are plain numbers: a new length or stride never compiles a new kernel. What is `None`
    is compiled away.
    """
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    parameters = inspect.signature(function).parameters.values()
    numbers = [p.name for p in parameters if p.annotation is not gl.constexpr and not is_tensor(p.name)]
    return gluon.jit(function, do_not_specialize=numbers)
