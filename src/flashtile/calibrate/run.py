"""A measurement by several processes: a few cells at a time, all compile, and then take turns on the GPU."""

import contextlib
import fcntl
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..as_arch import install_inherited
from ..bench.cell import Cell
from .store import Row, read

AT_ONCE = 3  # cells whose kernels a process compiles before all of them measure
MEASURING = 20.0  # seconds at the end in which no process compiles, so that all measure what they have compiled
HUNG = 180.0  # seconds without a result, after which processes are ended


def measure_all(cells: Sequence[Cell], store: Path, seconds: float) -> int:
    """Measure the cells that a store lacks until the time is over; returns how many are missing."""
    known = {row.cell for row in read(store) if not row.stale}
    missing = [cell for cell in cells if without_source(cell) not in known]
    end = time.time() + seconds
    context = multiprocessing.get_context("spawn")
    shares = [share for share in divided(missing, os.cpu_count() or 1) if share]
    rounds = max(map(len, shares), default=0)
    lock, turns = context.Lock(), context.Barrier(len(shares) or 1)
    workers = [context.Process(target=work, args=(share, rounds, store, end, lock, turns)) for share in shares]
    for worker in workers:
        worker.start()
    size, since = -1, time.time()
    while any(worker.is_alive() for worker in workers):
        time.sleep(0.5)
        now = store.stat().st_size if store.is_file() else 0
        if now != size:
            size, since = now, time.time()
        if time.time() - since > HUNG:
            for worker in workers:
                worker.kill()
    done = {row.cell for row in read(store) if not row.stale}
    return sum(without_source(cell) not in done for cell in cells)


def without_source(cell: Cell) -> Cell:
    """A cell as a store keeps it."""
    return Cell.from_dict({**cell.as_dict(), "source": ""})


def divided(cells: Sequence[Cell], processes: int) -> list[list[Cell]]:
    """The cells of each process: as many as others have, of few kernels, with forward mode last."""
    kinds: dict[Any, list[Cell]] = {}
    for cell in cells:
        kinds.setdefault((cell.moves, cell.dtype, cell.head_dim, cell.width_v), []).append(cell)
    shares: list[list[Cell]] = [[] for _ in range(processes)]
    for kind in sorted(kinds.values(), key=lambda kind: (kind[0].moves, -len(kind))):
        most = -(-sum(cell.moves == kind[0].moves for cell in cells) // processes)
        kind.sort(key=lambda cell: (cell.differentiates, cell.causal, cell.is_special))
        for start in range(0, len(kind), most):
            min(shares, key=len).extend(kind[start : start + most])
    return shares


def work(cells: list[Cell], rounds: int, store: Path, end: float, lock: Any, turns: Any) -> None:
    """A process: in turns, compile the kernels of a few cells, and measure them when no process compiles. Cells whose
    kernels are not all compiled when the time ends are left out.
    """
    from .measure import measure, ready

    install_inherited()
    device = torch.device("cuda")
    for start in range(0, rounds, AT_ONCE):
        few = []
        for cell in cells[start : start + AT_ONCE]:
            if ready(cell, device, end - MEASURING):
                few.append(cell)
            torch.cuda.empty_cache()
        wait(turns)
        for cell in few:
            with lock:
                if time.time() < end:
                    append(measure(cell, device), store)
                    torch.cuda.empty_cache()
        wait(turns)


def wait(turns: Any) -> None:
    """Wait for the other processes, until one of them has died."""
    with contextlib.suppress(threading.BrokenBarrierError):
        turns.wait(HUNG)


def append(row: Row, store: Path) -> None:
    with store.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(row.to_json() + "\n")
