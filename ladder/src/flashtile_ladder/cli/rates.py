"""Rates of a roofline, measured: products of matrices and copies of memory, each the best of many short runs."""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from ..iomodel import Machine

SECONDS = 0.05  # for each measurement
MIN_RUNS = 5
CPU_CHUNK = 2**22  # bytes that a CPU moves in one run


def machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The rates of a device, measured once in a process for each number of threads."""
    return _machine(device, dtype, torch.get_num_threads())


@functools.cache
def _machine(device: torch.device, dtype: torch.dtype, threads: int) -> Machine:
    return Machine(arithmetic(device, dtype), memory(device))


def arithmetic(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of PyTorch's product of square matrices."""
    n = 1024 if device.type == "cpu" else 4096
    a = torch.ones((n, n), dtype=dtype, device=device)
    return 2 * n**3 / best(lambda: a @ a, device)


def memory(device: torch.device) -> float:
    """Bytes/s of a copy (read and write) or a sum (read), the larger; on parts of a tensor larger than the caches."""
    size = 2**26 if device.type == "cpu" else 2**28
    chunk = CPU_CHUNK if device.type == "cpu" else size
    x = torch.ones(size, dtype=torch.uint8, device=device).view(torch.float32)
    y = torch.empty_like(x)
    pairs = list(zip(x.split(chunk // 4), y.split(chunk // 4), strict=True))
    copied = best(lambda a, b: b.copy_(a), device, pairs)
    read = best(lambda a, b: a.sum(), device, pairs)
    return max(2 * chunk / copied, chunk / read)


def best(run: Callable[..., Any], device: torch.device, arguments: list[tuple[Any, ...]] | None = None) -> float:
    """Seconds of the fastest run after a warm-up; runs cycle through the arguments."""
    arguments = arguments or [()]
    run(*arguments[-1])
    seconds, end = [], time.perf_counter() + SECONDS
    while len(seconds) < MIN_RUNS or time.perf_counter() < end:
        inputs = arguments[len(seconds) % len(arguments)]
        seconds.append(once(lambda inputs=inputs: run(*inputs), device))
    return min(seconds)


def once(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one run."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
