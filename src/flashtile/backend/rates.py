"""Measure the rates of a roofline: peak arithmetic and memory bandwidth of this machine.

No kernel may run faster than a roofline, so each rate is the best of many short runs, which other processes rarely
interrupt. On a CPU, arithmetic is measured on registers, because PyTorch's float32 matrix product may be slower than
attention.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..call.problem import accumulation_dtype
from ..iomodel import Machine
from .cpu import support as cpu

SECONDS = 0.05  # for each measurement
MIN_RUNS = 5
CHUNK_BYTES = 2**22  # that a CPU moves in one run, in a few tenths of a millisecond


def machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The rates of a device for one dtype, measured once in a process for each number of threads."""
    return _machine(device.type, device.index, dtype, torch.get_num_threads())


@functools.cache
def _machine(device_type: str, index: int | None, dtype: torch.dtype, threads: int) -> Machine:
    device = torch.device(device_type) if index is None else torch.device(device_type, index)
    return Machine(arithmetic(device, dtype, threads), memory(device))


def arithmetic(device: torch.device, dtype: torch.dtype, threads: int) -> float:
    """FLOP/s of multiply-adds on the registers of a CPU, or of a matrix product on other devices."""
    if device.type == "cpu" and cpu.unusable() is None:
        from .cpu.peak import flops_per_second

        return threads * flops_per_second(dtype)
    if device.type == "cpu":
        n, dtype = 512, accumulation_dtype(dtype)  # the dtype of attention's arithmetic
    else:
        n = 4096
    a = torch.ones((n, n), dtype=dtype, device=device)
    return 2 * n**3 / best(lambda: a @ a, device)


def memory(device: torch.device) -> float:
    """Bytes/s of a copy (read and write) or a sum (read), the larger; on chunks of a tensor larger than the caches."""
    size = 2**26 if device.type == "cpu" else 2**28
    chunk = CHUNK_BYTES if device.type == "cpu" else size
    x = torch.ones(size, dtype=torch.uint8, device=device).view(torch.float32)
    y = torch.empty_like(x)
    pairs = list(zip(x.split(chunk // 4), y.split(chunk // 4), strict=True))
    copied = best(lambda a, b: b.copy_(a), device, pairs)
    read = best(lambda a, b: a.sum(), device, pairs)
    return max(2 * chunk / copied, chunk / read)


def best(run: Callable[..., Any], device: torch.device, arguments: Sequence[tuple[Any, ...]] = ((),)) -> float:
    """Seconds of the fastest run after a warm-up; runs cycle through the arguments."""
    run(*arguments[-1])
    seconds, end = [], time.perf_counter() + SECONDS
    while len(seconds) < MIN_RUNS or time.perf_counter() < end:
        inputs = arguments[len(seconds) % len(arguments)]
        seconds.append(fastest(lambda inputs=inputs: run(*inputs), device, repeats=1))
    return min(seconds)


def fastest(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs."""
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
