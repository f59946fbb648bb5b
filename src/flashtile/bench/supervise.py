"""Long sweeps: cells are measured in a process that may crash or hang, and is then replaced by another one.

The process says before each step what it begins. When it dies there, or takes longer than a step may, the provider is
absent from that cell, with the reason, and the next process measures the cell without it. A cell whose rounds or inputs
end the process is absent as a whole. Each cell that is done is in the store.
"""

import faulthandler
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .. import processes
from ..as_arch import install_inherited
from .cell import Cell
from .origin import commit, device_name
from .providers import make
from .results import FAILED, Row
from .run import PREPARATION, ROUNDS, Bench, stamp
from .store import Store
from .sweep import Sweep, Timing

CODE = "from flashtile.bench import supervise; supervise.main()"
LOST = 3  # exit status of a process whose device is of no use any more
LAST_SECONDS = 5.0  # before the end no cell begins
FIRST_STEP_SECONDS = 300.0  # a process' time until its first step


class Unable(Exception):  # noqa: N818
    """The reason why no process can measure anything."""


@dataclass
class Work:
    """All that the process needs to know. `absent` are cells by their index among `cells`, provider and reason."""

    cells: tuple[Cell, ...]
    providers: tuple[str, ...]
    device: str
    timing: Timing
    reference: str | None
    fa3_library: str | None
    store: str
    step_seconds: float
    step_file: str = ""
    ends_at: float = float("inf")  # time.time()
    absent: list[tuple[int, str, str]] = field(default_factory=list)
    specialists: tuple[str, ...] = ()

    def as_json(self) -> str:
        return json.dumps({**vars(self), "cells": [c.as_dict() for c in self.cells], "timing": asdict(self.timing)})

    @classmethod
    def from_json(cls, text: str) -> "Work":
        values = json.loads(text)
        values |= {"cells": tuple(map(Cell.from_dict, values["cells"])), "timing": Timing(**values["timing"])}
        return cls(**values | {"absent": [tuple(x) for x in values["absent"]]})


# The process that supervises -----------------------------------------------------------------------------------------


def measure(work: Work, seconds: float | None, said: Callable[[str], None]) -> list[Cell]:
    """Measure the cells that the store lacks, for `seconds` at most; the cells that are left then. `said` gets each
    event in words.

    Raises:
        Unable: two processes in a row could not begin with a provider.
    """
    store, ends_at = Store(Path(work.store)), float("inf") if seconds is None else time.time() + seconds
    work.ends_at = ends_at if seconds is not None else time.time() + 1e9
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        work.step_file = str(Path(folder, "step"))
        while left := store.missing(work.cells, work.providers):
            remaining = ends_at - time.time()
            if remaining < LAST_SECONDS:
                break
            reason = run(work, None if seconds is None else remaining)
            if reason is None:
                break
            step = last_step(work)
            if step is None or (step[1] == PREPARATION and failures):
                raise Unable(reason)
            failures = failures + 1 if step[1] == PREPARATION else 0
            give_up(work, store, *step, reason)
            said(f"{work.cells[step[0]].label()}: {step[1]}: {reason}")
        else:
            return left
    return store.missing(work.cells, work.providers)


def run(work: Work, timeout: float | None) -> str | None:
    """Run one process to its end. The reason if it ended early, `None` if the time is up or everything is done."""
    Path(work.step_file).unlink(missing_ok=True)
    try:
        path = Path(work.step_file).with_suffix(".work")
        path.write_text(work.as_json())
        done = processes.run_python(CODE, str(path), timeout=timeout)
    except subprocess.TimeoutExpired:
        return None
    if done.returncode == 0:
        return None
    words = done.stderr.strip().splitlines()
    if done.returncode == LOST:
        return Path(work.step_file).with_suffix(".reason").read_text()
    if any(line.startswith("Timeout (") for line in words):
        return f"gave up after {work.step_seconds:g} s"
    return f"the process ended with {done.returncode}: {words[-1] if words else 'no word'}"


def last_step(work: Work) -> tuple[int, str] | None:
    """The step that the process began last: the cell's index, and a provider or a part of the cell."""
    path = Path(work.step_file)
    if not path.exists():
        return None
    index, _, step = path.read_text().partition(" ")
    return int(index), step


def give_up(work: Work, store: Store, index: int, step: str, reason: str) -> None:
    """Leave a provider out of a cell, or store the cell as failed."""
    if step not in (PREPARATION, ROUNDS):
        work.absent.append((index, step, reason))
        return
    cell, known = work.cells[index], {name: why for n, name, why in work.absent if n == index}
    rows = [Row(cell, name, FAILED, known.get(name, f"{step}: {reason}")) for name in work.providers]
    store.append(rows, about(torch.device(work.device)))


def about(device: torch.device) -> dict[str, Any]:
    return {"commit": commit(), "date": stamp(), "device": device_name(device)}


# The process that measures -------------------------------------------------------------------------------------------


def main() -> None:
    """Measure what is missing, as the process that may be replaced."""
    install_inherited()
    work = Work.from_json(Path(sys.argv[1]).read_text())
    store, device = Store(Path(work.store)), torch.device(work.device)
    origin = about(device)
    faulthandler.dump_traceback_later(FIRST_STEP_SECONDS, exit=True)
    library = Path(work.fa3_library) if work.fa3_library else None
    providers = make(work.providers, library)
    index = {cell: n for n, cell in enumerate(work.cells)}
    step_file = Path(work.step_file)

    def begin(cell: Cell, step: str) -> None:
        faulthandler.dump_traceback_later(work.step_seconds, exit=True)
        part = step_file.with_suffix(".part")
        part.write_text(f"{index[cell]} {step}")
        os.replace(part, step_file)

    absent = {(work.cells[n], name): reason for n, name, reason in work.absent}
    bench = Bench(device, providers, work.timing, work.reference, library, absent, begin, work.specialists)
    for cell in store.missing(work.cells, work.providers):
        if time.time() > work.ends_at - LAST_SECONDS:
            break
        rows = list(bench.run(Sweep("", (cell,)), lambda cell: None))
        if bench.lost is not None:
            begin(cell, culprit(rows, bench.lost))
            step_file.with_suffix(".reason").write_text(bench.lost)
            sys.stderr.flush()
            os._exit(LOST)  # the end of a process with a broken context may hang
        store.append(rows, origin)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # providers ask how much memory is free
    faulthandler.cancel_dump_traceback_later()


def culprit(rows: Sequence[Row], lost: str) -> str:
    """The provider after which the device was lost, or the preparation of the cell."""
    if rows[0].reason.startswith("no inputs"):
        return PREPARATION
    return next((row.provider for row in rows if row.status == FAILED and row.reason in lost), ROUNDS)
