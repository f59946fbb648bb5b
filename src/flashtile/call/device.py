"""The properties of a device that a plan depends on."""

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch


class Device(NamedTuple):
    """A device as plans see it: equal devices get equal plans."""

    type: str  # "cpu", "cuda", "mps", ...
    name: str  # for people: "NVIDIA H200"
    arch: str  # "sm_90", "gfx942", "x86_64", ...
    cores: int  # streaming multiprocessors, compute units, or CPU threads that torch uses
    clock: float = 0.0  # MHz, of a GPU; 0 if it is not known
    bandwidth: float = 0.0  # bytes of memory in a microsecond; 0 if it is not known


@functools.lru_cache(maxsize=64)
def _describe(kind: str, index: int, threads: int) -> Device:
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(index)
        hip = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
        arch = hip or f"sm_{properties.major}{properties.minor}"
        clock = getattr(properties, "clock_rate", 0) / 1e3
        bandwidth = getattr(properties, "memory_clock_rate", 0) / 1e3 * getattr(properties, "memory_bus_width", 0) / 4
        return Device(kind, properties.name, arch, properties.multi_processor_count, clock, bandwidth)
    if kind == "cpu":
        return Device(kind, f"CPU ({torch.backends.cpu.get_cpu_capability()})", platform.machine(), threads)
    return Device(kind, kind, kind, 1)


def host_readable(x: torch.Tensor) -> bool:
    """Whether the host may look at values: on a CPU only, for reading back from elsewhere waits for the device."""
    return x.device.type == "cpu"


_of_meta: ContextVar[Device | None] = ContextVar("of_meta", default=None)


@contextmanager
def meta_tensors_on(device: Device) -> Iterator[None]:
    """Inside, tensors without memory stand for tensors on this device."""
    token = _of_meta.set(device)
    try:
        yield
    finally:
        _of_meta.reset(token)


def describe_device(device: torch.device) -> Device:
    if device.type == "meta" and (assumed := _of_meta.get()) is not None:
        return assumed
    index = device.index if device.index is not None else 0
    return _describe(device.type, index, torch.get_num_threads() if device.type == "cpu" else 0)
