"""Memory between rounds of calls, while nothing runs: its amount, and whether it grows."""

import ctypes
import gc
import mmap
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from .. import private_torch

MIB = 2**20
STATM = Path("/proc/self/statm")
# Permitted growth in bytes, from the middle third of a soak to its last third. Allocators keep freed memory; how much,
# depends on the order of calls; the caching allocator's count of used memory does not.
LIMITS = {
    "resident": 16 * MIB,
    "GPU, allocated": 1 * MIB,
    "GPU, reserved": 32 * MIB,
    "GPU, in use by the driver's count": 64 * MIB,
}
# glibc keeps freed memory, also of finished threads. It is returned before a sample: it is not growth.
trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
FEWEST = 6  # samples, for thirds of at least two


class Growth(NamedTuple):
    """Medians over the middle and the last third of the samples, in bytes."""

    middle: float
    last: float
    limit: int

    @property
    def ok(self) -> bool:
        return self.last - self.middle <= self.limit


def sample(device: torch.device) -> dict[str, int]:
    """Bytes by the names of `LIMITS`."""
    gc.collect()
    if trim is not None:
        trim(0)
    counts = {} if (size := resident()) is None else {"resident": size}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        private_torch.clear_cublas_workspaces()  # PyTorch keeps one for each pair of thread and stream
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        counts |= dict(zip([*LIMITS][1:], (allocated, reserved, total - free), strict=True))
    return counts


def resident() -> int | None:
    """Resident bytes of this process, or its peak if the kernel does not report them."""
    if STATM.exists():
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE
    if sys.platform == "win32":
        return None
    import resource  # POSIX only

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def growth(samples: Sequence[dict[str, int]]) -> dict[str, Growth]:
    """Growth of each count; empty for too few samples."""
    if len(samples) < FEWEST:
        return {}
    third = len(samples) // 3
    parts = samples[-2 * third : -third], samples[-third:]
    middle, last = ({name: statistics.median(x[name] for x in part) for name in samples[0]} for part in parts)
    return {name: Growth(middle[name], last[name], LIMITS[name]) for name in samples[0]}
