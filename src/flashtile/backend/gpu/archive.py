"""Archives of GPU kernels that were compiled ahead, one file for each architecture (`backend.archive`).

The index has, for each kernel, its parameters and its binaries by key (`signature.key_of`).
"""

import functools
import os
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...call.device import describe_device
from ..archive import PACKAGE, ArchiveFile, file_name, hash_of, open_archive, warn
from .binary import Binary
from .driver import driver
from .installed import triton_version
from .kernel import Kernel
from .pointers import Slots, resolved
from .signature import QuickKeys, key_of

KERNELS_VARIABLE = "FLASHTILE_KERNELS"
ALSO_FOR = {"sm_89": "sm_86"}  # architectures that run the machine code of another one, with as much shared memory
GENERATORS = ("backend/gpu/generated.py", "backend/gpu/grouped.py", "backend/gpu/captured.py")
SOURCES = {  # files that kernels are made from, by backend: all below a folder, or one
    "hopper": ("backend/hopper/kernels", "backend/hopper/tile_config.py", "call/call.py", *GENERATORS),
    "triton": ("backend/triton/kernels", "backend/triton/constants.py", *GENERATORS),
}


class Archive(ArchiveFile):
    """An open archive for one architecture.

    Raises:
        OSError, ValueError, KeyError: the file cannot be read, is damaged, or is for something else.
    """

    def __init__(self, path: Path, arch: str, library: Any = driver):
        super().__init__(path, (arch, ALSO_FOR.get(arch, arch)), sources())
        self.driver = library()
        self.binaries: dict[tuple[Kernel, str], Binary] = {}
        self.quick: dict[Kernel, tuple[QuickKeys, dict[Hashable, Binary | None]]] = {}

    @property
    def version(self) -> tuple[int, ...]:
        """Major and minor version of the Triton that compiled it."""
        return tuple(int(part) for part in self.index["triton"].split(".")[:2])

    @property
    def words(self) -> str:
        """In words: "compiled ahead by Triton 3.6.0"."""
        return f"compiled ahead by Triton {self.index['triton']}"

    def __len__(self) -> int:
        return sum(len(kernel["binaries"]) for kernel in self.index["kernels"].values())

    def key(self, kernel: Any, scalars: Mapping[str, Any], pointers: Mapping[str, Any]) -> str | None:
        """The key of a launch, if the archive has its kernel. One made for a score_mod is no `Kernel`."""
        known = self.index["kernels"].get(kernel.title) if isinstance(kernel, Kernel) else None
        if known is None:
            return None
        parameters = known["parameters"]
        names = {name for name, _ in parameters}
        options = {name: x for name, x in scalars.items() if name not in names}
        key = key_of(parameters, {**scalars, **pointers}, options)
        return key if key in known["binaries"] else None

    def find(self, kernel: Any, scalars: Mapping[str, Any], pointers: Mapping[str, Any]) -> Binary | None:
        """The binary of a launch; `None` if it has to be compiled."""
        if (quick := self.quick.get(kernel)) is None:
            known = self.index["kernels"].get(kernel.title) if isinstance(kernel, Kernel) else None
            if known is None:
                return None
            quick = self.quick[kernel] = QuickKeys(known["parameters"]), {}
        keys, found = quick
        key = keys.key({**scalars, **pointers}, {name: x for name, x in scalars.items() if name not in keys.names})
        if key not in found:
            found[key] = self.binary(kernel, scalars, pointers)
        return found[key]

    def binary(self, kernel: Kernel, scalars: Mapping[str, Any], pointers: Mapping[str, Any]) -> Binary | None:
        """As `find`, by the file's own keys."""
        key = self.key(kernel, scalars, pointers)
        if key is None:
            return None
        if (binary := self.binaries.get((kernel, key))) is None:
            known = self.index["kernels"][kernel.title]
            facts = known["binaries"][key]
            image = functools.partial(self.image, facts["cubin"])
            binary = self.binaries[kernel, key] = Binary(known["parameters"], facts, image, self.driver)
        return binary


@functools.cache
def sources() -> dict[str, str]:
    """The hash of the kernels' sources, by backend."""
    return {backend: hash_of(paths) for backend, paths in SOURCES.items()}


# The archives of a process ------------------------------------------------------------------------------------------

_archives: dict[str, Archive | None] = {}  # by architecture
_devices: dict[torch.device, Archive | None] = {}


def archive_of(device: torch.device) -> Archive | None:
    """The archive for a device, read at its first call; `None` without one."""
    try:
        return _devices[device]
    except KeyError:
        found = archive_for(describe_device(device).arch) if device.type == "cuda" else None
        return _devices.setdefault(device, found)


def archive_for(arch: str) -> Archive | None:
    """The archive for an architecture, such as "sm_90"."""
    if arch in _archives:
        return _archives[arch]
    make = functools.partial(Archive, arch=arch)
    return _archives.setdefault(arch, open_archive(packaged(arch), KERNELS_VARIABLE, make))


def packaged(arch: str) -> Path:
    """The package's archive for an architecture, or its name."""
    other = PACKAGE / file_name(ALSO_FOR.get(arch, arch))
    own = PACKAGE / file_name(arch)
    return other if other.is_file() and not own.is_file() else own


def compiler_version(arch: str) -> tuple[int, ...] | None:
    """Major and minor version of the Triton that kernels are planned for: the archive's, else the installed one."""
    archive = archive_for(arch)
    return triton_version() if archive is None else archive.version


def give_up(archive: Archive, error: Exception) -> None:
    """Compile the kernels of an archive from now on, because of this error."""
    if _archives.get(archive.arch) is archive:
        warn(archive.path, KERNELS_VARIABLE, error)
    _archives[archive.arch] = None
    _devices.clear()


def forget() -> None:
    """Read the archives anew."""
    _archives.clear()
    _devices.clear()


if hasattr(os, "register_at_fork"):  # a child would read at its parent's position in the file, under its locks
    os.register_at_fork(after_in_child=forget)


def find(
    kernel: Any, scalars: Mapping[str, Any], slots: Slots, tensors: Sequence[Tensor | None]
) -> tuple[Archive, Binary] | None:
    """The binary of a launch and its archive."""
    if tensors[0] is None:
        return None
    archive = archive_of(tensors[0].device)
    if archive is None:
        return None
    binary = archive.find(kernel, scalars, resolved(slots, tensors))
    return None if binary is None else (archive, binary)
