"""Compilation targets: a processor, its vector width, and the size of the kernels' accumulator tiles."""

import ctypes
import functools
import os
import platform
import sys
from typing import Any, NamedTuple

from ...errors import BackendError

VECTORS_VARIABLE = "FLASHTILE_CPU_VECTORS"


class Target(NamedTuple):
    """A processor, for the compiler, and the microkernel sizes that suit its registers, for the generators."""

    triple: str
    cpu: str
    features: str  # LLVM's list, "+avx2,-avx512f,..."
    vector_bytes: int
    vectors: int  # accumulator tile: this many vectors of query rows ...
    rows: int  # ... by this many keys or value features
    fma: bool
    half: bool  # has instructions that convert float16
    tiles: str | None = None  # whose bfloat16 matrix tiles: "amx", or "emulated", with other instructions


# By name, widest first: the features that a processor must have, and the accumulator tile that fits its registers.
AVX512, AVX2 = ("avx512f", "avx512bw", "avx512dq", "avx512vl"), ("avx2", "fma", "f16c")
WIDE: dict[str, Any] = {"vector_bytes": 64, "vectors": 4, "rows": 6}
WIDTHS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "amx": ((*AVX512, "amx-tile", "amx-bf16"), WIDE | {"tiles": "amx"}),
    "avx512": (AVX512, WIDE),
    "avx2": (AVX2, {"vector_bytes": 32, "vectors": 2, "rows": 6}),
    "baseline": ((), {"vector_bytes": 16, "vectors": 2, "rows": 6}),
    "neon": (("neon",), {"vector_bytes": 16, "vectors": 4, "rows": 6}),
    "amx-emulated": (AVX2, WIDE | {"tiles": "emulated"}),
}
VECTORS_BESIDE = {"amx": "avx512", "amx-emulated": "avx2"}
X86_WIDTHS = ("amx", "avx512", "avx2", "baseline", "amx-emulated")
NARROWEST = 16  # bytes of a vector
GENERIC_CPUS = {
    "amx": "sapphirerapids",
    "avx512": "x86-64-v4",
    "avx2": "x86-64-v3",
    "baseline": "x86-64",
    "neon": "generic",
    "amx-emulated": "x86-64-v3",
}
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # numbers of Linux on x86-64


def make_target(width: str, triple: str, cpu: str | None = None, features: str = "") -> Target:
    """A target with vectors of this width; without `cpu`, for any processor that has them."""
    hardware = width != "baseline"
    return Target(triple, cpu or GENERIC_CPUS[width], features, **WIDTHS[width][1], fma=hardware, half=hardware)


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


def host_width(tiles: bool) -> str:
    """The name of this machine's widest vectors, or of its matrix tiles if a kernel uses them."""
    width = requested_width() or usable_widths()[0]
    return VECTORS_BESIDE.get(width, width) if not tiles else width


@functools.cache
def usable_widths() -> list[str]:
    """Vector widths that this processor has, widest first."""
    from llvmlite import binding as llvm

    host_features = llvm.get_host_cpu_features()
    widths = ("neon",) if platform.machine().lower() in ("arm64", "aarch64") else X86_WIDTHS
    usable = [width for width in widths if all(host_features.get(x) for x in WIDTHS[width][0])]
    return usable[1:] if usable[0] == "amx" and not tiles_permitted() else usable


def tiles_permitted() -> bool:
    """Ask the system for AMX's tile registers: without its permission, the first use ends the process."""
    if sys.platform != "linux":
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


@functools.cache
def _host(requested: str | None) -> Target:
    from llvmlite import binding as llvm

    if (reason := misconfigured()) is not None:
        raise BackendError(reason, {}, works="tiled")
    triple, cpu, host_features = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    usable = usable_widths()
    if requested is not None and requested != usable[0]:
        return make_target(requested, triple)
    host_features["prefer-256-bit"] = False  # with it, LLVM splits 512-bit vectors
    return make_target(usable[0], triple, cpu, host_features.flatten())
