"""Optional packages: imported when they are needed, with one sentence where they are absent or too old."""

import importlib
import importlib.metadata
from types import ModuleType

from ..errors import AttentionError


def version_of(package: str) -> tuple[int, ...]:
    """The first two numbers of an installed package's version."""
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


def require(package: str, versions: tuple[tuple[int, ...], tuple[int, ...]]) -> ModuleType:
    """Import a package whose version is at least the first and below the second of `versions`.

    Raises:
        AttentionError: the package is absent, or of another version.
    """
    least, below = (".".join(map(str, version)) for version in versions)
    works = f"  a command that helps: pip install '{package}>={least},<{below}'"
    try:
        found = version_of(package)
    except importlib.metadata.PackageNotFoundError:
        raise AttentionError(f"{package} is not installed.\n  accepted: {least} up to {below}\n{works}") from None
    if not versions[0] <= found < versions[1]:
        given = importlib.metadata.version(package)
        raise AttentionError(f"{package} is version {given}.\n  accepted: {least} up to {below}\n{works}")
    return importlib.import_module(package)
