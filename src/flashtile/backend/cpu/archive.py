"""The archive of kernels compiled ahead for processors of a kind, and their machine code in memory.

The index has the kernels of each width of vectors by key: the hash of their code and where in it they begin. The code
is flat: it has no relocations, and runs wherever it lies. It is mapped from a file in memory, so that no page is ever
both writable and executable. Linux alone has those; elsewhere kernels are compiled.
"""

import hashlib
import mmap
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from ..archive import ERRORS, PACKAGE, ArchiveFile, file_name, hash_of, open_archive, warn
from .targets import Target, host

KERNELS_VARIABLE = "FLASHTILE_CPU_KERNELS"
ARCH = "cpu"
SOURCES = (
    "backend/cpu/kernels",
    *(f"backend/cpu/{name}.py" for name in ("tables", "targets", "variant", "workspace")),
    "call/call.py",
    "expression/blocks/evaluation.py",
)
_archive: dict[str, ArchiveFile | None] = {}
_mapped: list[mmap.mmap] = []  # for good, as kernels run in them


def key_of(name: str, variant: Any, target: Target) -> str:
    """The key of a kernel among the kernels of the target's width."""
    return hashlib.sha256(repr((name, variant, target)).encode()).hexdigest()[:32]


def sources() -> str:
    return hash_of(SOURCES)


def archive() -> ArchiveFile | None:
    """The archive of this process, opened at its first kernel; `None` without one."""
    if ARCH not in _archive:
        opened = (
            open_archive(PACKAGE / file_name(ARCH), KERNELS_VARIABLE, of_this_version)
            if sys.platform == "linux"
            else None
        )
        return _archive.setdefault(ARCH, opened)
    return _archive[ARCH]


def of_this_version(path: Path) -> ArchiveFile:
    return ArchiveFile(path, (ARCH,), sources())


def forget() -> None:
    """Read the archive anew."""
    _archive.clear()


if hasattr(os, "register_at_fork"):  # a child would read at its parent's position in the file, under its locks
    os.register_at_fork(after_in_child=forget)


def find(name: str, variant: Any, target: Target) -> int | None:
    """The address of a kernel in memory; `None` if it has to be compiled."""
    known = archive()
    if known is None:
        return None
    try:
        found = known.index["kernels"].get(target.width, {}).get(key_of(name, variant, target))
        return None if found is None else mapped(known.image(found[0])) + found[1]
    except ERRORS as error:
        warn(known.path, KERNELS_VARIABLE, error)
        _archive[ARCH] = None
        return None


def in_words() -> str:
    """The origin of the kernels for this processor."""
    known, width = archive(), host().width
    count = 0 if known is None else len(known.index["kernels"].get(width, ()))
    if known is None or count == 0:
        return "compiled at first use by LLVM"
    return f"{count} compiled ahead for {width} ({known.path}), the others at first use by LLVM"


def mapped(code: bytes) -> int:
    """The address of executable memory with this code.

    Raises:
        OSError: the system permits none.
    """
    with open(os.memfd_create("flashtile"), "w+b") as file:
        file.write(code)
        file.flush()
        memory = mmap.mmap(file.fileno(), len(code), mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    _mapped.append(memory)
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
