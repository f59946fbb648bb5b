"""Latency and rate of a GPU's memory, level by level: registers, shared memory, L2 and HBM. Measured on a GPU.

    latency   one thread, each access at an address that the access before returned: a walk through a ring. In registers
              a chain of multiply-adds, each with the result of the one before
    rate      all multiprocessors, with accesses that do not depend on one another. In registers 16 bytes for each
              multiply-add: three numbers read, one written

Rings in global memory have a place every 256 bytes, in random order: no line is fetched for a neighbor's sake. That of
L2 has 4 MiB. That of HBM has 256 MiB, more than any L2 holds, and a walk never comes to a place twice. Loads of both go
past L1, which is the same memory as shared memory.

A level is worth having where a tile is used more often than it is fetched: FlashAttention is the choice of what lies on
which level. Hiding a latency takes rate x latency bytes under way (Little's law): several warps on a multiprocessor.

The kernels are in memory_levels.cu. On a GPU, `python -m flashtile_ladder measure.memory_levels` prints the table.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .._host import cuda_launch
from .._host.cuda_compile import source
from .memory_patterns import fastest_ms

PLACE = 64  # numbers between two places of a ring: 256 bytes
RINGS = {"L2": 2**14, "HBM": 2**20}  # places
RING_SHARED = 1024  # numbers, as in the kernel
STEPS = {"registers": 2**18, "shared": 2**17, "L2": 2**15, "HBM": 2**15}
REPEATS = {"registers": 4096, "shared": 512, "L2": 64, "HBM": 1}
READ_BYTES = {"L2": 16 * 2**20, "HBM": 2**30}
WARPS_OF_A_MULTIPROCESSOR = 32


def launch(name: str, grid: int, threads: int, *arguments: Any) -> None:
    cuda_launch.launch(source("measure/memory_levels.cu"), name, (grid, 1), (threads, 1), *arguments)


def ring(places: int, distance: int, device: torch.device) -> Tensor:
    """`[places * distance]` int32: from each place, at a multiple of `distance`, the next one; one ring of all."""
    order = torch.randperm(places, generator=torch.Generator().manual_seed(0)) * distance
    following = torch.zeros(places * distance, dtype=torch.int32)
    following[order] = order.roll(-1).to(torch.int32)
    return following.to(device)


def walk(level: str, steps: int, following: Tensor, place: Tensor, cycles: Tensor) -> None:
    """Walk on from `place`; `cycles` gets the multiprocessor's clock. `following` is a ring, or one float."""
    if level == "registers":
        launch("walk_registers", 1, 1, following, 0.5, cycles, steps)
    else:
        launch("walk_shared" if level == "shared" else "walk_global", 1, 1, following, place, cycles, steps)


def latency(level: str, device: torch.device) -> dict[str, float]:
    """Cycles and nanoseconds of one dependent access."""
    if level == "registers":
        following = torch.zeros(1, device=device)
    elif level == "shared":
        following = ring(RING_SHARED, 1, device)
    else:
        following = ring(RINGS[level], PLACE, device)
    if level == "HBM":
        torch.zeros_like(following)  # the ring's end leaves L2
    place = torch.zeros(1, dtype=torch.int32, device=device)
    cycles, steps = torch.zeros(1, dtype=torch.int64, device=device), STEPS[level]
    ms = fastest_ms(lambda: walk(level, steps, following, place, cycles))
    return {"latency_cycles": cycles.item() / steps, "latency_ns": 1e6 * ms / steps}


def rate(level: str, device: torch.device) -> dict[str, float]:
    """Bytes for each second, of all multiprocessors together."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    blocks, threads = multiprocessors * WARPS_OF_A_MULTIPROCESSOR // 8, 256
    sums, repeats = torch.empty(blocks * threads, device=device), REPEATS[level]
    if level == "registers":
        moved = len(sums) * 8 * 16 * repeats
        ms = fastest_ms(lambda: launch("use_registers", blocks, threads, sums, 0.5, repeats))
    elif level == "shared":
        x = torch.ones(RING_SHARED, device=device)
        moved = len(sums) * (RING_SHARED // 32) * 4 * repeats
        ms = fastest_ms(lambda: launch("read_shared", blocks, threads, x, sums, repeats))
    else:
        x = torch.ones(READ_BYTES[level] // 4, device=device)
        moved = x.nbytes * repeats
        ms = fastest_ms(lambda: launch("read_global", blocks, threads, x, sums, len(x) // 4, repeats))
    return {"tb_per_s": moved / ms / 1e9}


def levels(device: torch.device) -> Iterator[dict[str, Any]]:
    """One row for each level, from the nearest to the farthest."""
    for level in STEPS:
        row = latency(level, device) | rate(level, device)
        yield {"level": level} | row | {"kb_under_way": row["tb_per_s"] * row["latency_ns"]}


def main() -> None:
    for line in levels(cuda_launch.gpu()):
        print(", ".join(f"{name} {x:.4g}" if isinstance(x, float) else f"{name} {x}" for name, x in line.items()))
