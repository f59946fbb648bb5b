"""Answer `import flash_attn` of programs and libraries that expect it with `flashtile.compat.flash_attn`.

A finder at the end of `sys.meta_path` makes the modules, and has the metadata of a distribution `flash-attn`. Both are
there from `install` to `uninstall`, and only in a process that has no `flash_attn` of its own.
"""

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder, PackagePath
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import AttentionError

NAME = "flash_attn"
SOURCE = "flashtile.compat.flash_attn"
VERSION = "2.8.3"  # the release whose interface this is
PACKAGES = ("", ".layers")
MODULES = ("", ".bert_padding", ".flash_attn_interface", ".layers", ".layers.rotary")
METADATA = f"""\
Metadata-Version: 2.1
Name: flash-attn
Version: {VERSION}
Summary: FlashAttention's interface, computed by flashtile
"""


class FlashAttnDistribution(Distribution):
    """Metadata of a distribution `flash-attn`."""

    def read_text(self, filename: str) -> str | None:
        return {"METADATA": METADATA, "top_level.txt": f"{NAME}\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path

    @property
    def files(self) -> list[PackagePath] | None:
        return None


class FlashAttnLoader(Loader):
    """Loader that fills a module with the public names of flashtile's module."""

    def __init__(self, source: str):
        self.source = source

    def exec_module(self, module: ModuleType) -> None:
        source = importlib.import_module(self.source)
        module.__doc__, module.__file__ = source.__doc__, source.__file__  # errors of missing names show the file
        for name in (*getattr(source, "__all__", ()), "__version__"):
            if hasattr(source, name):
                setattr(module, name, getattr(source, name))


class FlashAttnFinder(DistributionFinder):
    """Finder of the modules and the metadata of `flash_attn`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = fullname.removeprefix(NAME)
        if not fullname.startswith(NAME) or name not in MODULES:
            return None
        loader = FlashAttnLoader(f"{SOURCE}{name}")
        return importlib.util.spec_from_loader(fullname, loader, origin=SOURCE + name, is_package=name in PACKAGES)

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        asked = {} if context is None else vars(context)
        wanted = (asked.get("name") or "flash-attn").replace("_", "-").lower()
        elsewhere = "path" in asked and asked["path"] is not sys.path
        return [] if elsewhere or wanted != "flash-attn" else [FlashAttnDistribution()]


FINDER = FlashAttnFinder()


class Installation:
    """Context manager that `install` returns, and that uninstalls at the end of a `with` block."""

    def __enter__(self) -> "Installation":
        return self

    def __exit__(self, *exception: object) -> None:
        uninstall()


def install() -> Installation:
    """Make `import flash_attn` find `flashtile.compat.flash_attn` in this process, until `uninstall`.

    `importlib.util.find_spec` and `importlib.metadata` find it too, under the version that it follows. Call it before
    transformers is imported, which reads the list of packages once. A second call changes nothing.

    Raises:
        AttentionError: a `flash_attn` is installed or imported already. It stays as it is.
    """
    if FINDER not in sys.meta_path:
        found = sys.modules.get(NAME) or importlib.util.find_spec(NAME)
        if found is not None:
            place = getattr(found, "__file__", None) or getattr(found, "origin", None) or "a package without a file"
            raise AttentionError(
                f"flash_attn exists already: {place}.\n  accepted: a Python environment without flash_attn\n"
                "  a call that works: from flashtile.compat.flash_attn import flash_attn_func"
            )
        sys.meta_path.append(FINDER)
        importlib.invalidate_caches()
    return Installation()


def uninstall() -> None:
    """Undo `install`: `import flash_attn` fails again. Names that were imported meanwhile keep working."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        for name in MODULES:
            sys.modules.pop(NAME + name, None)
