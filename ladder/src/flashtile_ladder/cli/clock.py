"""Time of a GPU alone: events around calls that are queued while the device is held up. Host time never counts."""

import time
from collections.abc import Callable
from typing import Any

import torch

CYCLES_PER_SECOND = 2.0e9  # of the SM clock, at most; the device is held up a little too long rather than too short
LONGEST_HOLD = 0.5  # seconds


class Clock:
    """The clock of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    @property
    def cache_bytes(self) -> int:
        """Size of the L2 cache."""
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    def seconds(self, run: Callable[[], Any], calls: int) -> float:
        """Seconds of one call. The device spins while the host queues all calls; then they run back to back."""
        with torch.cuda.device(self.device):
            queueing = calls * self.host_seconds(run, min(calls, 3))
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(min(1.5 * queueing + 1e-4, LONGEST_HOLD) * CYCLES_PER_SECOND))
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / calls

    def host_seconds(self, run: Callable[[], Any], calls: int) -> float:
        """Seconds that the host takes to queue one call."""
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        spent = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return spent / calls
