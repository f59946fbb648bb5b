"""What LLVM compiles for: a processor, its vectors, and how many of them the kernels hold at a time."""

import functools
import os
import platform
from typing import Any, NamedTuple

from ...errors import BackendError
from .support import VECTORS_VARIABLE, misconfigured


class Target(NamedTuple):
    """A processor as generators and the compiler see it."""

    triple: str
    cpu: str
    features: str  # LLVM's list, "+avx2,-avx512f,..."
    vector_bytes: int
    vectors: int  # of a row of accumulators: query rows in the lanes of this many vectors ...
    rows: int  # ... by this many keys or value features
    fma: bool
    half: bool  # converts float16 in hardware


# By name, widest first: what a processor must have, and the accumulators that fit into its registers.
WIDTHS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "avx512": (("avx512f", "avx512bw", "avx512dq", "avx512vl"), {"vector_bytes": 64, "vectors": 4, "rows": 6}),
    "avx2": (("avx2", "fma", "f16c"), {"vector_bytes": 32, "vectors": 2, "rows": 6}),
    "baseline": ((), {"vector_bytes": 16, "vectors": 2, "rows": 6}),
    "neon": (("neon",), {"vector_bytes": 16, "vectors": 4, "rows": 6}),
}
GENERIC_CPUS = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "baseline": "x86-64", "neon": "generic"}


def make_target(width: str, triple: str, cpu: str | None = None, features: str = "") -> Target:
    """A target by its vectors; without `cpu`, any processor that has them."""
    hardware = width != "baseline"
    return Target(triple, cpu or GENERIC_CPUS[width], features, **WIDTHS[width][1], fma=hardware, half=hardware)


def requested_width() -> str | None:
    """The width that the environment variable `FLASHTILE_CPU_VECTORS` asks for."""
    return os.environ.get(VECTORS_VARIABLE)


def host() -> Target:
    """This machine's, with narrower vectors if these are asked for."""
    return _host(requested_width())


@functools.cache
def usable_widths() -> list[str]:
    """Widths that this processor has, widest first."""
    from llvmlite import binding as llvm

    host_features = llvm.get_host_cpu_features()
    widths = ("neon",) if platform.machine().lower() in ("arm64", "aarch64") else ("avx512", "avx2", "baseline")
    return [width for width in widths if all(host_features.get(x) for x in WIDTHS[width][0])]


@functools.cache
def _host(requested: str | None) -> Target:
    from llvmlite import binding as llvm

    if (reason := misconfigured()) is not None:
        raise BackendError(reason, {}, works="tiled")
    triple, cpu, host_features = llvm.get_process_triple(), llvm.get_host_cpu_name(), llvm.get_host_cpu_features()
    usable = usable_widths()
    if requested is not None and requested != usable[0]:
        return make_target(requested, triple)
    host_features["prefer-256-bit"] = False  # LLVM would split our vectors
    return make_target(usable[0], triple, cpu, host_features.flatten())
