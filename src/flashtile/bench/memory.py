"""Peak memory of one call: by the allocator's count, and on Linux by the growth of the process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .allocation import live_and_peak_bytes
from .cell import Cell
from .inputs import make_case
from .providers import Declined, Prepared, Provider

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory(cell: Cell, provider: Provider, device: torch.device) -> dict[str, Any]:
    """Memory that a method needs for itself.

    `value`: peak bytes of torch's allocator during a call, minus the results. `resident_bytes`: growth of the process
    in an earlier call, on a CPU. It includes memory from other allocators and one-time setup, but no memory that the
    process already had.

    Forward saves nothing for backward. Backward is counted from the end of forward.
    """
    prepared = provider.prepare(make_case(cell, device))
    run = backward_of(prepared, cell, device) if cell.differentiates else prepared.forward
    grown = resident_growth(run) if device.type == "cpu" else None
    kept: list[Any] = []
    _, peak = live_and_peak_bytes(lambda: kept.append(run()), device)
    results = kept[0] if isinstance(kept[0], tuple) else kept
    stay = sum(x.numel() * x.element_size() for x in results)
    return {"value": peak - stay, "resident_bytes": None if grown is None else max(0, grown - stay)}


def backward_of(prepared: Prepared, cell: Cell, device: torch.device) -> Callable[[], Any]:
    """Backward alone: an uncounted first run does its forward."""
    dout = make_case(cell, device, seed=1).dout
    if prepared.backward is None or dout is None:
        raise Declined("no backward")
    backward = prepared.backward
    backward(dout)
    return lambda: backward(dout)


def resident_growth(run: Callable[[], Any]) -> int | None:
    """Growth of the resident set; `None` if the kernel does not report it."""
    try:
        before = status_bytes("VmRSS")
        RESET.write_text("5")  # reset the high-water mark
    except OSError:
        return None
    run()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
