"""Memory of a call, from the events of torch's own allocator: every byte, the same on each run."""

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch


def live_and_peak_bytes(run: Callable[[], Any], device: torch.device | None = None) -> tuple[int, int]:
    """Bytes that `run` leaves allocated (its results), and the most that it had allocated at a time."""
    gc.collect()  # garbage of an earlier run must not be freed in this one
    if device is not None and device.type != "cpu":
        return on_accelerator(run, device)
    # `torch.profiler.profile`, which wraps this one, imports TorchInductor first: 3 s.
    with without_messages(), torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profiler:
        kept = run()  # noqa: F841  alive until the profiler has stopped
    results: Any = profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return sum(sizes), max(itertools.accumulate(sizes), default=0)


def on_accelerator(run: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    kept = run()  # noqa: F841
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device) - before, torch.cuda.max_memory_allocated(device) - before


@contextlib.contextmanager
def without_messages() -> Iterator[None]:
    """Silence stderr: the profiler of some versions of PyTorch writes two lines there at each use, from C++."""
    try:
        stderr = sys.__stderr__.fileno()  # type: ignore[union-attr]
        saved = os.dup(stderr)
    except (AttributeError, OSError, ValueError):  # there is no such file
        yield
        return
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), stderr)
    try:
        yield
    finally:
        os.dup2(saved, stderr)
        os.close(saved)
