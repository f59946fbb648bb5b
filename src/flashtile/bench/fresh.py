"""Measurements that need a process of their own: the first call's latency, and peak memory.

`in_one_process` runs `main` in one, which prints one line of JSON.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import processes
from .cell import FIRST_CALLS, Cell
from .inputs import make_case
from .memory import peak_memory
from .providers import Declined, Provider, make

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
    """Measure a job's one cell in each of `runs` processes.

    Yields a `value` in seconds or bytes, or a reason under `declined` or `error`. Caches of compiled code are empty
    for each `first_call_cold`; before `first_call_warm` one process fills them.
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
    """One measurement for each cell."""
    return in_one_process((job,), caches)[0]


def in_one_process(jobs: Sequence[Job], caches: str) -> list[list[dict[str, Any]]]:
    """Measurements of several jobs in one process, whose start takes longer than a small job."""
    code = "from flashtile.bench import fresh; fresh.main()"
    environment = os.environ | {name: str(Path(caches, name)) for name in CACHE_VARIABLES}
    try:
        done = processes.run_python(code, *(job.as_json() for job in jobs), env=environment, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return nothing(jobs, f"gave up after {PATIENCE} s")
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[{")]
    if done.returncode or not lines:
        words = done.stderr.strip().splitlines()
        return nothing(jobs, f"the process ended with {done.returncode}: {words[-1] if words else 'no word'}")
    return json.loads(lines[-1])


def nothing(jobs: Sequence[Job], reason: str) -> list[list[dict[str, Any]]]:
    return [[{"error": reason}] * len(job.cells) for job in jobs]


def measure(job: Job) -> list[dict[str, Any]]:
    """Measure a job, in the fresh process."""
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
        return peak_memory(cell, provider, device)
    except Declined as reason:
        return {"declined": str(reason)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def warm_up(device: torch.device) -> None:
    """Do the work that every process does once, with any library."""
    x = torch.ones((64, 64), device=device)
    (x @ x).sum().item()


def first_call(cell: Cell, provider: Provider, device: torch.device) -> float:
    """Seconds from tensors to result. The library's imports and compilation count; torch, and flashtile's own light
    import, are loaded before.
    """
    case = make_case(cell, device)
    start = time.perf_counter()
    provider.prepare(case).forward()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    """Measure all jobs, as the fresh process."""
    print(json.dumps([measure(Job.from_json(text)) for text in sys.argv[1:]]))
