"""Device time of all plans of a cell, in CUDA graphs, gaps between launches included; interleaved medians."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ..backend.gpu.installed import triton_release
from ..bench.cell import Cell
from ..call.device import describe_device
from ..call.plan import Plan
from ..dispatch.passes import entry_of
from .candidates import Subject, plans
from .sources import kinds
from .store import Row, sources_of

ROUNDS, FEW_ROUNDS = 7, 3
LONG = 2e4  # microseconds of a call that is repeated less
SAMPLE = 300.0  # microseconds of calls one after another
FIRST_CALLS, MOST_CALLS = 4, 20
TOLERANCE = 0.05  # difference of results that two plans may have


def runner(subject: Subject, plan: Plan, forward: tuple[Any, Any] | None) -> Callable[[], torch.Tensor]:
    """The function that runs a pass by a plan."""
    entry = entry_of(plan.backend)
    if subject.moves is not None:
        tangents = subject.tangents
        return lambda: entry.tangents(plan, subject.call, tangents)[2]
    if subject.needs is None:
        return lambda: entry.forward(plan, subject.call)[0]
    out, lse = forward or (None, None)
    return lambda: entry.backward(plan, subject.call, subject.needs, out, lse, subject.dout, None).q


def prepared(subject: Subject) -> tuple[Any, Any] | None:
    """The results of forward that a backward pass takes."""
    if subject.needs is None:
        return None
    failure: Exception | None = None
    for _, plan in plans(subject._replace(needs=None)):
        try:
            return entry_of(plan.backend).forward(plan, subject.call)  # type: ignore[no-any-return]
        except Exception as error:  # the next one may run
            failure = error
    raise RuntimeError(f"no plan of forward runs: {failure}")


def ready(cell: Cell, device: torch.device, end: float) -> bool:
    """Run each plan once, so that its kernels are compiled and loaded; returns whether all were before the end."""
    if time.time() >= end:
        return False
    subject = Subject.of(cell, device)
    forward = prepared(subject)
    for _, plan in plans(subject):
        if time.time() >= end:
            return False
        try:
            runner(subject, plan, forward)()
            torch.cuda.synchronize()
        except Exception as error:
            raise_if_lost(error)
    return True


def measure(cell: Cell, device: torch.device) -> Row:
    """The times of all plans that run, and why the others do not.

    Raises:
        RuntimeError: the GPU does not go on, or no plan runs.
    """
    subject = Subject.of(cell, device)
    forward = prepared(subject)
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    refused: dict[str, str] = {}
    first: torch.Tensor | None = None
    for name, plan in plans(subject):
        torch.manual_seed(0)  # tangents are drawn for each
        try:
            run = runner(subject, plan, forward)
            result = run().float()
            torch.cuda.synchronize()
            first = result if first is None else first
            error = float((result - first).abs().max() / (first.abs().max() + 1e-9))
            if error > TOLERANCE:
                refused[name] = f"results differ by {error:.2g} of the largest"
            else:
                graphs[name] = captured(run)
        except Exception as error:
            raise_if_lost(error)
            refused[name] = f"{type(error).__name__}: {str(error)[:120]}"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for n in range(ROUNDS):
        for name, (graph, calls) in graphs.items():
            if n < FEW_ROUNDS or times[name][0] < LONG:
                times[name].append(elapsed(graph.replay) / calls)
    middle = {name: spread(sorted(values)) for name, values in times.items()}
    here = describe_device(device)
    return Row(cell, here.name, triton_release() or "", sources_of(cell, kinds(here.arch)), middle, refused)


def raise_if_lost(error: Exception) -> None:
    """Raise an error after which a GPU refuses all further work of this process."""
    if "CUDA error" in str(error) or "illegal" in str(error):
        raise error


def captured(run: Any) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of so many calls that its launch counts little, and their number."""
    if elapsed(run) >= 4 * SAMPLE:  # with the work of the host
        return graph_of(run, 1), 1
    graph = graph_of(run, FIRST_CALLS)
    wanted = min(MOST_CALLS, round(SAMPLE * FIRST_CALLS / elapsed(graph.replay)))
    return (graph, FIRST_CALLS) if wanted <= FIRST_CALLS else (graph_of(run, wanted), wanted)


def graph_of(run: Any, calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    graph.replay()
    return graph


def elapsed(function: Any) -> float:
    """Microseconds of the device's work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def spread(values: list[float]) -> list[float]:
    """The median, the lowest but one and the highest but one."""
    outer = 1 if len(values) > 2 else 0
    return [round(x, 2) for x in (statistics.median(values), values[outer], values[-1 - outer])]
