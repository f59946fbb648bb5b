"""Time on a CUDA GPU: events around work that is queued while the device is held up, so that host time never counts."""

import subprocess
import time
from collections.abc import Sequence
from typing import Any

import torch

from .clock import Run

CYCLES_PER_SECOND = 2.0e9  # the SM clock, at most; the device is held up a little too long rather than too short
LONGEST_HOLD = 0.5  # seconds
QUERIES = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")


class CudaClock:
    kind, graphs = "CUDA events", True

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)

    @property
    def cache_bytes(self) -> int:
        return torch.cuda.get_device_properties(self.device).L2_cache_size

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def seconds(self, run: Run, calls: int) -> float:
        """Seconds of one call. The device spins while the host queues all calls; then they run back to back."""
        with torch.cuda.device(self.device):
            queueing = calls * (self.host_seconds(run, min(calls, 3)) or 0.0)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(min(1.5 * queueing + 1e-4, LONGEST_HOLD) * CYCLES_PER_SECOND))
            start.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / calls

    def host_seconds(self, run: Run, calls: int) -> float | None:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        spent = time.perf_counter() - start
        torch.cuda.synchronize(self.device)
        return spent / calls

    def eager_seconds(self, run: Run, calls: int) -> float:
        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - start) / calls

    def replayable(self, runs: Sequence[Run]) -> Run:
        """A CUDA graph of the calls one after another, captured on the stream of their first call: autograd runs
        backward on the stream of forward. Calls that cannot be captured raise here.
        """
        with torch.cuda.device(self.device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for run in runs:
                    run()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                for run in runs:
                    run()

        def replay(kept: Sequence[Run] = tuple(runs)) -> None:  # their tensors have to stay where the graph reads them
            graph.replay()

        return replay

    def state(self) -> dict[str, Any]:
        """Clock rates, power and temperature from nvidia-smi; empty without it."""
        command = ["nvidia-smi", f"--id={self.uuid()}", f"--query-gpu={','.join(QUERIES)}"]
        try:
            output = subprocess.run(
                [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return {}
        return dict(zip(QUERIES, (x.strip() for x in output.stdout.splitlines()[0].split(",")), strict=False))

    def uuid(self) -> str:
        return "GPU-" + str(torch.cuda.get_device_properties(self.device).uuid).removeprefix("GPU-")
