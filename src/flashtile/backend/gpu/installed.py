"""Which Triton is installed, found without importing it."""

import functools
import importlib.metadata

# Builds of Triton have names of their own: PyTorch's nightly and ROCm builds, and the one for Windows.
DISTRIBUTIONS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-windows")


@functools.cache
def triton_release() -> str | None:
    """The version in full; `None` without Triton."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


@functools.cache
def triton_version() -> tuple[int, ...] | None:
    """Major and minor; `None` without Triton."""
    release = triton_release()
    return None if release is None else tuple(int(part) for part in release.split(".")[:2])
