"""Compilation targets: vectors of a width with the size of the kernels' accumulator tiles, and processors."""

import ctypes
import functools
import os
import platform
import sys
from typing import Any, NamedTuple

from ...errors import BackendError

VECTORS_VARIABLE = "FLASHTILE_CPU_VECTORS"


class Target(NamedTuple):
    """Vectors, and the microkernel sizes that suit their registers, for the generators."""

    width: str  # their name
    vector_bytes: int
    vectors: int  # accumulator tile: this many vectors of query rows ...
    rows: int  # ... by this many keys or value features
    fma: bool
    half: bool  # has instructions that convert float16
    tiles: str | None = None  # whose bfloat16 matrix tiles: "amx", or "emulated", with other instructions


class Processor(NamedTuple):
    """A processor, for the compiler."""

    triple: str
    cpu: str
    features: str = ""  # LLVM's list, "+avx2,-avx512f,..."


# By name, widest first: the features that a processor must have, and the accumulator tile that fits its registers. They
# include all of the generic processor below, for which narrower vectors than a processor's and archives are compiled.
AVX2 = ("avx2", "fma", "f16c", "bmi", "bmi2", "lzcnt", "movbe")
AVX512 = (*AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
AMX = ("amx-tile", "amx-bf16")
WIDE: dict[str, Any] = {"vector_bytes": 64, "vectors": 4, "rows": 6}
WIDTHS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "amx": ((*AVX512, *AMX), WIDE | {"tiles": "amx"}),
    "avx512": (AVX512, WIDE),
    "avx2": (AVX2, {"vector_bytes": 32, "vectors": 2, "rows": 6}),
    "baseline": ((), {"vector_bytes": 16, "vectors": 2, "rows": 6}),
    "neon": (("neon",), {"vector_bytes": 16, "vectors": 4, "rows": 6}),
    "amx-emulated": (AVX2, WIDE | {"tiles": "emulated"}),
}
VECTORS_BESIDE = {"amx": "avx512", "amx-emulated": "avx2"}
X86_WIDTHS = ("amx", "avx512", "avx2", "baseline", "amx-emulated")
NARROWEST = 16  # bytes of a vector
GENERIC = {
    "amx": ("x86-64-v4", ",".join(f"+{x}" for x in AMX)),
    "avx512": ("x86-64-v4", ""),
    "avx2": ("x86-64-v3", ""),
    "baseline": ("x86-64", ""),
    "neon": ("generic", ""),
    "amx-emulated": ("x86-64-v3", ""),
}
NAMES_OF_LINUX = {"amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "bmi1": "bmi", "abm": "lzcnt", "asimd": "neon"}
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # numbers of Linux on x86-64


def make_target(width: str) -> Target:
    """The target with vectors of this width."""
    hardware = width != "baseline"
    return Target(width, **WIDTHS[width][1], fma=hardware, half=hardware)


def generic(width: str, triple: str) -> Processor:
    """Any processor with vectors of this width."""
    return Processor(triple, *GENERIC[width])


def misconfigured() -> str | None:
    """The error if the environment variable requests vectors that this processor lacks; `None` if it does not."""
    requested = os.environ.get(VECTORS_VARIABLE)
    if requested is None:
        return None
    usable = usable_widths()
    return (
        None
        if requested in usable
        else f"{VECTORS_VARIABLE} is {requested!r}. Accepted here: {', '.join(map(repr, usable))}"
    )


def requested_width() -> str | None:
    """The vector width that the environment variable `FLASHTILE_CPU_VECTORS` requests, by name."""
    return os.environ.get(VECTORS_VARIABLE)


def host() -> Target:
    """This machine's target, with narrower vectors if the environment variable requests them."""
    return _host(requested_width())


@functools.cache
def _host(requested: str | None) -> Target:
    if (reason := misconfigured()) is not None:
        raise BackendError(reason, {}, works="tiled")
    return make_target(requested or usable_widths()[0])


def timed() -> Target:
    """The target of expected times: this machine's, also where the environment variable names none that it has."""
    return make_target(usable_widths()[0]) if misconfigured() else host()


def host_width(tiles: bool) -> str:
    """The name of this machine's widest vectors, or of its matrix tiles if a kernel uses them."""
    width = requested_width() or usable_widths()[0]
    return VECTORS_BESIDE.get(width, width) if not tiles else width


@functools.cache
def usable_widths() -> list[str]:
    """Vector widths that this processor has, widest first."""
    widths = ("neon",) if platform.machine().lower() in ("arm64", "aarch64") else X86_WIDTHS
    usable = [width for width in widths if host_features().issuperset(WIDTHS[width][0])]
    return usable[1:] if usable[0] == "amx" and not tiles_permitted() else usable


@functools.cache
def host_features() -> frozenset[str]:
    """This processor's features, by LLVM's names. Linux lists them in less time than LLVM takes to load."""
    if sys.platform == "linux":
        with open("/proc/cpuinfo") as file:
            lines = (line.partition(":") for line in file)
            listed = next((x for name, _, x in lines if name.strip() in ("flags", "Features")), None)
        if listed is not None:
            return frozenset(NAMES_OF_LINUX.get(x, x) for x in listed.split())
    from llvmlite import binding as llvm

    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present)


def tiles_permitted() -> bool:
    """Ask the system for AMX's tile registers: without its permission, the first use ends the process."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


@functools.cache
def processor(width: str) -> Processor:
    """The processor that code is compiled for here: this one, but any with these vectors where it has wider ones."""
    from llvmlite import binding as llvm

    triple, features = llvm.get_process_triple(), llvm.get_host_cpu_features()
    if width != usable_widths()[0]:
        return generic(width, triple)
    features["prefer-256-bit"] = False  # with it, LLVM splits 512-bit vectors
    return Processor(triple, llvm.get_host_cpu_name(), features.flatten())
