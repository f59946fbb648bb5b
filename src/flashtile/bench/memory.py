"""Peak memory of one call: as the allocator counts it, and on Linux also as the whole process grows."""

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
    """`value`: the most bytes of torch's allocator at a time during a call, less the results that stay: what the method
    needs for itself. `resident_bytes`: how far the process has grown in an earlier such call, on a CPU; it sees memory
    that a library takes elsewhere and what it sets up once, but not what the process had before and has kept.

    Forward keeps nothing for a backward. Backward is counted from where forward has ended.
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
    """Backward of a forward that is already done: the first run, not counted, does it."""
    dout = make_case(cell, device, seed=1).dout
    if prepared.backward is None or dout is None:
        raise Declined("no backward")
    backward = prepared.backward
    backward(dout)
    return lambda: backward(dout)


def resident_growth(run: Callable[[], Any]) -> int | None:
    """How far the resident set rises above what it was before; `None` where the kernel does not tell."""
    try:
        before = status_bytes("VmRSS")
        RESET.write_text("5")  # the high-water mark starts anew
    except OSError:
        return None
    run()
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[name].split()[0]) * 1024
