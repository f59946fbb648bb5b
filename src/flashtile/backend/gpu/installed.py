"""Which Triton is installed, found without importing it."""

import functools
import importlib.metadata


@functools.cache
def triton_version() -> tuple[int, ...] | None:
    """Major and minor; `None` without Triton."""
    try:
        return tuple(int(part) for part in importlib.metadata.version("triton").split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return None
