"""The tables of a report: few and short ones that any machine measures, and their cells in words.

`tables(device, quick)` is what other programs call: `flashtile report` has its tables as a section.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from .._host.triton_or_not import on
from .long import long
from .measure import Measurement, Table, one_thread
from .show import in_figures, pivoted
from .stack import stack
from .tables import TABLES

QUICK = ("stack", "long", "intensity")
FURTHER = (*QUICK, "lite", "tiles", "rounding")
ON_A_GPU = ("cuda", "coalescing", "banks")
# Columns of all tables in words.
HEADINGS = {
    "n": "N",
    "step": "step",
    "ms": "ms",
    "median_ms": "median, ms",
    "spread": "median over fastest",
    "page_faults": "page faults",
    "online_tf32": "error, online in TF32",
    "error": "largest error",
    "extra_mib": "memory, MiB",
    "speedup": "speed-up",
    "saving": "memory saved, times",
    "algorithm": "algorithm",
    "mb_moved": "moved, MB",
    "intensity": "operations for each byte",
    "limit": "limited by",
    "bound_ms": "limit, ms",
    "tiles": "tiles",
    "lite": "error, lite",
    "online": "error, online",
    "on_chip": "on chip",
    "tile": "tile",
    "flash1_mb_read": "FlashAttention-1, MB read",
    "flash1_mb_written": "FlashAttention-1, MB written",
    "flash2_mb_read": "FlashAttention-2, MB read",
    "flash2_mb_written": "FlashAttention-2, MB written",
    "flash1_ms": "FlashAttention-1, ms",
    "flash2_ms": "FlashAttention-2, ms",
    "flash1_median_ms": "FlashAttention-1, median, ms",
    "flash2_median_ms": "FlashAttention-2, median, ms",
    "where": "where",
    "scale": "scale",
    "change": "change",
    "out_moves_by": "out moves by",
    "lse_moves_by": "lse moves by",
    "out_error": "error of out",
    "lse_error": "error of lse",
    "tflops": "TFLOP/s",
    "registers": "registers",
    "spilled_bytes": "spilled, bytes",
    "shared_bytes": "shared memory, bytes",
    "stride": "stride",
    "gb_per_s_used": "GB/s used",
    "slower": "times slower",
    "kernel": "kernel",
    "padded_ms": "with padding, ms",
    "unpadded_ms": "without, ms",
}


class Amount(NamedTuple):
    """How much is measured."""

    names: tuple[str, ...]  # of tables
    stack_seqlens: tuple[int, ...]  # of every step
    long_seqlens: tuple[int, ...]  # of fused steps
    seconds: float  # for each step and length


def amount(device: torch.device, quick: bool) -> Amount:
    if quick:
        return Amount(QUICK, (16, 64), (1024,), 0.05)
    return Amount(FURTHER + (ON_A_GPU if device.type == "cuda" else ()), (8, 16, 32, 64), (1024, 2048, 4096), 0.2)


class Cells(NamedTuple):
    """A table in words. `numbers` are the columns with figures."""

    caption: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: frozenset[int]


def tables(device: torch.device, quick: bool) -> Iterator[Table]:
    """The tables of a report, each when it is measured; the first is `stack`."""
    wanted = amount(device, quick)
    for name in wanted.names:
        with on(device), one_thread():
            table = finished(measurement(name, device, wanted))
        yield table


def measurement(name: str, device: torch.device, wanted: Amount) -> Measurement:
    if name == "stack":
        return stack(device, wanted.stack_seqlens, wanted.seconds)
    if name == "long":
        return long(device, wanted.long_seqlens, wanted.seconds)
    return TABLES[name](device)


def finished(work: Measurement) -> Table:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def cells(table: Table) -> Cells:
    """As `flashtile-ladder` prints it, under words, without what is published elsewhere."""
    whole = pivoted([row | {"published_ms": None} for row in table.rows]) if table.name == "stack" else table.rows
    rows = [{name: x for name, x in row.items() if not name.startswith("published")} for row in whole]
    columns = tuple(heading(name) for name in rows[0])
    numbers = frozenset(i for i, x in enumerate(rows[0].values()) if not isinstance(x, str) or columns[i][:1] == "N")
    figures = [tuple(in_figures(x) or "–" for x in row.values()) for row in rows]
    return Cells(table.title.partition(" (in brackets")[0], columns, figures, numbers)


def heading(name: str) -> str:
    """A column's heading for readers: those of a pivot, "N = 64", are words already."""
    return name if " " in name else HEADINGS[name]
