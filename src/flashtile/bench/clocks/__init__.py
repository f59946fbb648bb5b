"""How time passes on a device: one file for the CPU, one for CUDA, one interface."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

Run = Callable[[], Any]


class Clock(Protocol):
    """What the rest of the benchmark knows of a device."""

    kind: str  # how `seconds` are measured, in words

    @property
    def cache_bytes(self) -> int:
        """Of the last level of cache: inputs that are to be read from memory must be some times larger."""
        ...

    def seconds(self, run: Run, calls: int) -> float:
        """Of one call, the mean of `calls` back to back, without the time that the host takes to ask for them."""
        ...

    def host_seconds(self, run: Run, calls: int) -> float | None:
        """Until one call returns on the host, with the device idle; `None` where host and device are one."""
        ...

    def replayable(self, runs: Sequence[Run]) -> Run:
        """Something that does all of `runs` with as little host time as the device allows."""
        ...

    def state(self) -> dict[str, Any]:
        """Clock rates, power and temperature now, as far as the machine tells."""
        ...


def clock_of(device: torch.device) -> Clock:
    if device.type == "cuda":
        from .cuda import CudaClock

        return CudaClock(device)
    from .cpu import CpuClock

    return CpuClock(device)
