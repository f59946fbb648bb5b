"""Answer `import flash_attn` of programs and libraries that expect it with `flashtile.compat.flash_attn`.

A finder at the end of `sys.meta_path` makes the modules, and has the metadata of a distribution `flash-attn`. Both are
there from `install` to `uninstall`, and only in a process that has no `flash_attn` of its own. The modules and the
distributions of FlashAttention-3 and -4 are there if `install` was asked for them.
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
INTERFACE_3 = "flash_attn_interface"
SOURCE = "flashtile.compat.flash_attn"
VERSION = "2.8.3"  # the release whose interface this is
PACKAGES = (NAME, f"{NAME}.layers", f"{NAME}.cute")
MODULES = {
    NAME + name: SOURCE + name for name in ("", ".bert_padding", ".flash_attn_interface", ".layers", ".layers.rotary")
}
MODULES_3 = {INTERFACE_3: "flashtile.compat.flash_attn_3"}
MODULES_4 = dict.fromkeys((f"{NAME}.cute", f"{NAME}.cute.interface"), "flashtile.compat.flash_attn_4")
# Distributions, by the module that shows that they are installed: name, version, and the module at its top.
DISTRIBUTIONS = {
    NAME: ("flash-attn", VERSION, NAME),
    INTERFACE_3: ("flash-attn-3", "3.0.0", INTERFACE_3),
    f"{NAME}.cute": ("flash-attn-4", "4.0.0", NAME),
}
METADATA = """\
Metadata-Version: 2.1
Name: {}
Version: {}
Summary: FlashAttention's interface, computed by flashtile
"""


class FlashAttnDistribution(Distribution):
    """Metadata of a distribution of FlashAttention."""

    def __init__(self, name: str, version: str, top: str):
        self.texts = {"METADATA": METADATA.format(name, version), "top_level.txt": f"{top}\n"}

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(filename)

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

    def __init__(self) -> None:
        self.modules = MODULES

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        source = self.modules.get(fullname)
        if source is None:
            return None
        loader = FlashAttnLoader(source)
        return importlib.util.spec_from_loader(fullname, loader, origin=source, is_package=fullname in PACKAGES)

    def find_distributions(self, context: Any = None) -> Iterable[Distribution]:
        asked = {} if context is None else vars(context)
        if "path" in asked and asked["path"] is not sys.path:
            return []
        wanted = asked.get("name")
        name = None if wanted is None else wanted.replace("_", "-").lower()
        present = [described for module, described in DISTRIBUTIONS.items() if module in self.modules]
        return [FlashAttnDistribution(*described) for described in present if name in (None, described[0])]


FINDER = FlashAttnFinder()


class Installation:
    """Context manager that `install` returns, and that uninstalls at the end of a `with` block."""

    def __enter__(self) -> "Installation":
        return self

    def __exit__(self, *exception: object) -> None:
        uninstall()


def install(*, flash_attn_3: bool = False, flash_attn_4: bool = False) -> Installation:
    """Make `import flash_attn` find `flashtile.compat.flash_attn` in this process, until `uninstall`.

    `importlib.util.find_spec` and `importlib.metadata` find it too, under the version that it follows. Call it before
    transformers is imported, which reads the list of packages once. The same call again changes nothing.

    Args:
        flash_attn_3: also make `import flash_attn_interface`, the name of FlashAttention-3, find
            `flashtile.compat.flash_attn_3`. Programs that find that module prefer it to `flash_attn`.
        flash_attn_4: also make `import flash_attn.cute`, the name of FlashAttention-4, find
            `flashtile.compat.flash_attn_4`.

    Raises:
        AttentionError: one of these modules is installed or imported already. It stays as it is.
    """
    if FINDER not in sys.meta_path:
        refuse_another(NAME, "from flashtile.compat.flash_attn import flash_attn_func")
    modules = FINDER.modules
    if flash_attn_3 and INTERFACE_3 not in modules:
        refuse_another(INTERFACE_3, "from flashtile.compat.flash_attn_3 import flash_attn_func")
        modules = modules | MODULES_3
    FINDER.modules = modules | MODULES_4 if flash_attn_4 else modules
    if FINDER not in sys.meta_path:
        sys.meta_path.append(FINDER)
    importlib.invalidate_caches()
    return Installation()


def refuse_another(name: str, instead: str) -> None:
    found = sys.modules.get(name) or importlib.util.find_spec(name)
    if found is not None:
        place = getattr(found, "__file__", None) or getattr(found, "origin", None) or "a package without a file"
        raise AttentionError(
            f"{name} exists already: {place}.\n  accepted: a Python environment without {name}\n"
            f"  a call that works: {instead}"
        )


def uninstall() -> None:
    """Undo `install`: `import flash_attn` fails again. Names that were imported meanwhile keep working."""
    if FINDER in sys.meta_path:
        sys.meta_path.remove(FINDER)
        for name in FINDER.modules:
            sys.modules.pop(name, None)
        FINDER.modules = MODULES
