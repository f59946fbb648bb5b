"""Measurements that need a process of their own: the first call's latency, and peak memory.

`in_fresh_process` starts `python -m flashtile.bench.fresh JOB`, which prints one line of JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .cell import FIRST_CALLS, Cell
from .inputs import make_case
from .providers import Declined, Prepared, Provider, make

PATIENCE = 900  # seconds until a process is given up
CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUTE_DSL_CACHE_DIR", "XDG_CACHE_HOME")


@dataclass(frozen=True)
class Job:
    """Measurements of one provider, one after another in one process."""

    cells: tuple[Cell, ...]
    provider: str
    device: str
    fa3_library: str | None = None

    def as_json(self) -> str:
        return json.dumps({**vars(self), "cells": [cell.as_dict() for cell in self.cells]})

    @classmethod
    def from_json(cls, text: str) -> "Job":
        values = json.loads(text)
        return cls(**values | {"cells": tuple(map(Cell.from_dict, values["cells"]))})


def samples(job: Job, runs: int) -> Iterator[dict[str, Any]]:
    """The finding of a job's one cell in each of `runs` processes: a `value`, seconds or bytes, or the reason under
    `declined` or `error`. Caches of compiled code are empty for each `first_call_cold`; before `first_call_warm` one
    process fills them.
    """
    with contextlib.ExitStack() as stack:

        def caches() -> str:
            return stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))

        shared = caches()
        (cell,) = job.cells
        if cell.measure == "first_call_warm":
            in_fresh_process(job, shared)
        for _ in range(runs):
            (finding,) = in_fresh_process(job, caches() if cell.measure == "first_call_cold" else shared)
            yield finding
            if "value" not in finding:
                return


def in_fresh_process(job: Job, caches: str) -> list[dict[str, Any]]:
    """One finding for each cell."""
    command = [sys.executable, "-m", "flashtile.bench.fresh", job.as_json()]
    environment = os.environ | {name: str(Path(caches, name)) for name in CACHE_VARIABLES}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)
    except subprocess.TimeoutExpired:
        return [{"error": f"gave up after {PATIENCE} s"}] * len(job.cells)
    lines = [line for line in done.stdout.splitlines() if line.startswith("[{")]
    if done.returncode or not lines:
        words = done.stderr.strip().splitlines()
        return [{"error": f"the process ended with {done.returncode}: {words[-1] if words else 'no word'}"}] * len(
            job.cells
        )
    return json.loads(lines[-1])


def measure(job: Job) -> list[dict[str, Any]]:
    """In the fresh process."""
    device = torch.device(job.device)
    warm_up(device)
    (provider,) = make([job.provider], Path(job.fa3_library) if job.fa3_library else None)
    return [measure_one(cell, provider, device) for cell in job.cells]


def measure_one(cell: Cell, provider: Provider, device: torch.device) -> dict[str, Any]:
    try:
        reason = provider.unusable(device)
        if reason is not None:
            raise Declined(reason)
        if cell.measure in FIRST_CALLS:
            return {"value": first_call(cell, provider, device)}
        return {"value": peak_bytes_of(cell, provider, device)}
    except Declined as reason:
        return {"declined": str(reason)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def warm_up(device: torch.device) -> None:
    """What every process pays once, whoever computes attention."""
    x = torch.ones((64, 64), device=device)
    (x @ x).sum().item()


def first_call(cell: Cell, provider: Provider, device: torch.device) -> float:
    """Seconds from having the tensors to having the result. What the library imports and compiles counts; torch, and
    flashtile's own light import, are there already.
    """
    case = make_case(cell, device)
    start = time.perf_counter()
    provider.prepare(case).forward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def peak_bytes_of(cell: Cell, provider: Provider, device: torch.device) -> int:
    """The most bytes allocated at a time during a call, less the results that stay: what the method needs for itself.

    Forward keeps nothing for a backward. Backward is counted from where forward has ended.
    """
    prepared = provider.prepare(make_case(cell, device))
    run: Callable[[], Any] = prepared.forward
    if cell.differentiates:
        run = backward_of(prepared, cell, device)
    with peak_bytes(device) as peak:
        kept = run()
    results = kept if isinstance(kept, tuple) else (kept,)
    return peak.bytes - sum(x.numel() * x.element_size() for x in results)


def backward_of(prepared: Prepared, cell: Cell, device: torch.device) -> Callable[[], Any]:
    """Backward of a forward that is already done: the first run, not counted, does it."""
    dout = make_case(cell, device, seed=1).dout
    if prepared.backward is None or dout is None:
        raise Declined("no backward")
    backward = prepared.backward
    backward(dout)
    return lambda: backward(dout)


class Peak:
    bytes: int = 0


@contextlib.contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """The most bytes allocated at a time inside, above what was allocated before.

    On a GPU the allocator's own peak; on a CPU from the allocation events that torch's profiler records.
    """
    peak = Peak()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield peak
        torch.accelerator.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - before
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        yield peak
    live = 0
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak.bytes = max(peak.bytes, live)


if __name__ == "__main__":
    print(json.dumps(measure(Job.from_json(sys.argv[1]))))
