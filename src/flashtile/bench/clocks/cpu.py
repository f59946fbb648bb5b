"""Time on a CPU, and on a device without a clock of its own: the wall clock around finished work."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .clock import Run

COMMON_CACHE = 32 * 2**20
IDLE_SECONDS = 1e-3  # processor time that a process may take in a rest
LONGEST_REST = 1.0  # seconds


class CpuClock:
    kind, graphs = "wall clock", False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def cache_bytes(self) -> int:
        """Size of the last level of cache as the kernel reports it, or 32 MiB."""
        sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        kibibytes = [int(size[:-1]) for size in sizes if size.endswith("K")]
        return max(kibibytes, default=COMMON_CACHE // 1024) * 1024

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)

    def rest(self, seconds: float) -> None:
        """Sleep until the process is idle. The threads of a pool spin after a call, ONNX Runtime's for 40 ms,
        and would share their cores with the threads of the next library.
        """
        end = time.perf_counter() + LONGEST_REST
        while True:
            start = time.process_time()
            time.sleep(seconds)
            if time.process_time() - start < IDLE_SECONDS or time.perf_counter() > end:
                return

    def seconds(self, run: Run, calls: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        self.wait()
        return (time.perf_counter() - start) / calls

    def eager_seconds(self, run: Run, calls: int) -> float:
        return self.seconds(run, calls)

    def host_seconds(self, run: Run, calls: int) -> None:
        return None

    def replayable(self, runs: Sequence[Run]) -> Run:
        def replay() -> None:
            for run in runs:
                run()

        return replay

    def state(self) -> dict[str, Any]:
        return {"load": os.getloadavg()[0]} if hasattr(os, "getloadavg") else {}
