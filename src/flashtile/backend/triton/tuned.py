"""Configurations that `flashtile tune` saved on this machine: a file in the user's directory, read once in a process.

An entry is for one chip, version of Triton, family of dtypes, width of the shipped configurations, and kernel. Entries
for others are kept. An invalid file is ignored with one warning.
"""

import functools
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from ...call.device import Device
from ...errors import AttentionWarning
from .. import user_files
from ..gpu.installed import triton_version

FILE = "triton-tiles.json"
FORMAT = 1
KERNELS = ("forward", "dkdv", "dq")
FAMILIES = ("half", "single")
BLOCKS, WARPS, STAGES = (16, 32, 64, 128, 256), (1, 2, 4, 8), range(1, 8)


class Entry(NamedTuple):
    """One kernel's configuration: query rows, keys, warps and stages. `measured` is for human readers."""

    device: str
    arch: str
    triton: str  # major and minor
    family: str  # of dtypes: float16 and bfloat16, or float32
    width: int  # of the shipped configurations that it replaces
    kernel: str
    launch: tuple[int, int, int, int]
    measured: dict[str, Any]

    @property
    def key(self) -> tuple[Any, ...]:
        return self[:6]


def path() -> Path:
    return user_files.directory() / FILE


def launches(device: Device, family: str, width: int) -> dict[str, tuple[int, int, int, int]]:
    """The saved configurations for one width, by kernel."""
    here = (device.name, device.arch, installed(), family, width)
    try:
        file = path()
    except FileNotFoundError:  # there is no cache
        return {}
    return {entry.kernel: entry.launch for entry in entries(file) if entry.key[:5] == here}


def installed() -> str:
    return ".".join(map(str, triton_version() or ()))


@functools.cache
def entries(file: Path) -> tuple[Entry, ...]:
    """The entries of a file; none, with a warning, if it is invalid."""
    try:
        return parsed(user_files.read(file.name))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"{file} is not used: {reason}\n  `flashtile tune` writes a new one", AttentionWarning, stacklevel=2
        )
        return ()


def parsed(text: bytes) -> tuple[Entry, ...]:
    """The entries of a file's text.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: the file is invalid.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"the format should be {FORMAT}")
    return tuple(checked(Entry(**entry | {"launch": tuple(entry["launch"])})) for entry in found["entries"])


def checked(entry: Entry) -> Entry:
    block_m, block_n, warps, stages = entry.launch
    known = entry.kernel in KERNELS and entry.family in FAMILIES
    if not known or block_m not in BLOCKS or block_n not in BLOCKS or warps not in WARPS or stages not in STAGES:
        raise ValueError(f"no kernel is run as {entry.kernel} {entry.family} {entry.launch}")
    return entry


def save(entry: Entry) -> Path:
    """Save an entry; it replaces one with the same key. An invalid file is overwritten."""
    file = path()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AttentionWarning)
        entries.cache_clear()
        kept = [other for other in entries(file) if other.key != entry.key]
    text = json.dumps({"format": FORMAT, "entries": [x._asdict() for x in (*kept, checked(entry))]}, indent=1) + "\n"
    user_files.write(text.encode(), FILE)
    entries.cache_clear()
    return file
