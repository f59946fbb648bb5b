"""Processor time of the ways to run calls on a CPU, on one thread; what a second thread costs; and the file of rates
that is fitted to these times.
"""

import ctypes
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..backend.cpu import rates as cpu_rates
from ..backend.cpu import support, targets, threads
from ..backend.cpu_cost import cost, tiled_cost
from ..backend.gpu.cost import Cost
from ..backend.tiled import support as tiled
from ..bench.cell import TIMED, Cell
from ..bench.sweep import load
from ..call.device import describe_device
from ..call.plan import Plan
from ..dispatch.passes import entry_of
from .candidates import Subject
from .fit import Fit, fit
from .run import append, without_source
from .store import Row, read, sources_of

CPU = torch.device("cpu")
KIND, ROUNDS, SAMPLE = "cpu", 9, 2e-3  # seconds of a sample
STARTS = 500  # a tenth of all starts is quicker than the one that counts
SHAPES = (  # batch, heads, key heads, rows, keys, features
    (1, 8, 8, 16, 16, 64), (4, 8, 8, 64, 64, 32), (1, 8, 8, 128, 128, 64), (1, 8, 2, 512, 512, 64),
    (1, 4, 4, 1024, 1024, 128), (1, 2, 2, 512, 512, 256), (1, 2, 2, 768, 768, 512),
)  # fmt: skip
DECODING = tuple((1, 8, 8, rows, keys, d) for rows in (1, 2, 4, 6, 8) for keys, d in ((1024, 64), (2048, 128)))
FEATURES: tuple[dict[str, Any], ...] = (
    {"causal": True}, {"bias": True}, {"mask": True}, {"alibi": True}, {"softcap": 30.0}, {"dropout": 0.1},
    {"window": (100, 0)},
)  # fmt: skip
DTYPES = ("float32", "bfloat16", "float16", "float64")


def standard(sweeps: Sequence[Path]) -> list[Cell]:
    """All calls, each once: of every dtype, with one feature each in float32, and of sweeps."""
    found = [cell for path in sweeps for cell in load(path).on("cpu").cells if cell.measure in TIMED]
    for dtype in DTYPES:
        for measure, shapes in (("forward", (*SHAPES, *DECODING)), ("backward", SHAPES)):
            found += [cell_of(shape, measure, dtype) for shape in shapes]
    plain = cell_of((1, 8, 8, 384, 384, 64), "forward", "float32")
    found += [replace(plain, measure=measure, **x) for measure in ("forward", "backward") for x in FEATURES]
    return list(dict.fromkeys(without_source(replace(cell, model="")) for cell in found))


def cell_of(shape: tuple[int, ...], measure: str, dtype: str) -> Cell:
    batch, heads, heads_kv, rows, keys, width = shape
    return Cell(measure, batch, heads, heads_kv, rows, keys, width, dtype=dtype)


def measure_all(cells: Sequence[Cell], store: Path, seconds: float) -> int:
    """Measure the cells that a store lacks until the time is over; returns how many are missing."""
    end = time.time() + seconds
    done = {row.cell for row in read(store) if not row.stale}
    missing = [cell for cell in cells if cell not in done]
    used = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        while missing and time.time() < end:
            append(measure(missing.pop(0)), store)
    finally:
        torch.set_num_threads(used)
    return len(missing)


def measure(cell: Cell) -> Row:
    """Microseconds of all ways to run a cell, in alternation."""
    subject = Subject.of(cell, CPU)
    runs = {name: runner(subject, plan) for name, plan in ways(subject)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    numbers = {name: repeats(run) for name, run in runs.items()}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(elapsed(run, numbers[name]))
    # Other processes only add to processor time, by the caches that they empty: of few rounds, the least one counts.
    kept = {name: [round(x, 2) for x in (min(values), statistics.median(values), max(values))]
            for name, values in times.items()}  # fmt: skip
    return Row(cell, cpu_rates.processor_name(), compiler(), sources_of(cell, (KIND,)), kept, {})


def ways(subject: Subject) -> Iterator[tuple[str, Plan]]:
    """The plans of a call by name."""
    problem, device = subject.problem, describe_device(CPU)
    for tile in support.ways_of(problem, subject.needs):
        name = "backward" if subject.needs is not None else "decode" if tile.decodes else "rows"
        yield name, Plan("cpu", tile, support.num_splits(problem), ())
    yield "tiled", Plan("tiled", tiled.tile(problem, device), 1, ())


def runner(subject: Subject, plan: Plan) -> Callable[[], Any]:
    """The function that runs a pass by a plan, as recorded where it can be."""
    entry, call = entry_of(plan.backend), subject.call
    record = getattr(entry, "record_forward" if subject.needs is None else "record_backward", None)
    rows: tuple[Any, ...] = ()
    if subject.needs is not None:
        out, lse = entry.forward(plan, call)
        rows = (out, lse, subject.dout, None)
    if record is not None:
        repeat, _ = record(plan, call, *(() if subject.needs is None else (subject.needs, *rows)))
        if repeat is not None:
            return lambda: repeat(call, *rows)
    if subject.needs is None:
        return lambda: entry.forward(plan, call)
    return lambda: entry.backward(plan, call, subject.needs, *rows)


def repeats(run: Callable[[], Any]) -> int:
    """Calls of a sample; the first one compiles."""
    run()
    return max(1, min(200, round(SAMPLE * 1e6 / elapsed(run, 1))))


def elapsed(run: Callable[[], Any], calls: int) -> float:
    """Microseconds of this thread's work."""
    with torch.no_grad():
        start = time.thread_time()
        for _ in range(calls):
            run()
        return (time.thread_time() - start) / calls * 1e6


def compiler() -> str:
    return f"llvmlite {importlib.metadata.version('llvmlite')}"


def start_of_a_thread() -> float:
    """Microseconds that a second thread takes to start and to end, by the clock."""
    nothing = ctypes.CDLL(None).abs  # a function that returns at once
    worker, found = ctypes.cast(nothing, threads.WORKER), list[float]()
    for count in (2, 1):
        samples = []
        for _ in range(STARTS):
            start = time.perf_counter()
            threads.run(worker, 0, count)
            samples.append(time.perf_counter() - start)
        found.append(sorted(samples)[STARTS // 10])
    return (found[0] - found[1]) * 1e6


def costs_of(row: Row) -> Iterator[tuple[Cost, float]]:
    """What each way of a cell does, and its time."""
    subject = Subject.of(row.cell, torch.device("meta"))
    backward = subject.needs is not None
    for name, plan in ways(subject):
        if plan.backend == "cpu":
            found = cost(subject.problem, plan.tile, backward=backward)
        else:
            found = tiled_cost(subject.problem, plan.tile, backward=backward)
        yield found, row.times[name][0]


def fitted(rows: Sequence[Row]) -> Fit:
    pairs = [pair for row in rows for pair in costs_of(row)]
    return fit([x for x, _ in pairs], [x for _, x in pairs])


def write(path: Path, rows: Sequence[Row], command: str) -> Fit:
    """Fit the rates of this processor, and write them."""
    found = fitted(rows)
    rates = found.rates | {"thread": start_of_a_thread()}
    errors = np.abs(found.errors)
    width = targets.usable_widths()[0]
    lines = [
        "# Microseconds of one thread, fitted to processor times of calls (`flashtile.backend.cpu_cost`); `thread`",
        "# is the start of one, measured by itself. Written by", f"# `{command}`.", "", "[chip]", f'kind = "{KIND}"',
        f'name = "{cpu_rates.processor_name()}"', f'vectors = "{width}"', f"cores = {torch.get_num_threads()}", "",
        "[fit]", f'torch = "{torch.__version__}"', f'llvmlite = "{rows[0].triton.split()[-1]}"',
        f"calls = {len(rows)}", f"ways = {len(errors)}",
        f"median_error = {np.median(errors):.3f}  # of a way's time", f"ninth_decile = {np.quantile(errors, 0.9):.3f}",
        "", "[rates]", *(f'"{name}" = {value:.4g}' for name, value in sorted(rates.items())),
    ]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")
    return found
