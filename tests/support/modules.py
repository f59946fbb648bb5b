"""The modules of the package, by name."""

from pathlib import Path

import flashtile

PACKAGE = Path(flashtile.__file__).parent


def modules() -> dict[str, Path]:
    """Every module of the package by its name without the leading `flashtile.`; the package itself is ''."""
    names = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


MODULES = modules()
