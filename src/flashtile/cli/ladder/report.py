"""The ladder as a section of `flashtile report`: the tables of `flashtile ladder`, in a quick report fewer and shorter.

It is the command line that puts it there, since nothing else may import the ladder.
"""

from collections.abc import Callable

from ...ladder.triton_or_not import on
from ...report.section import Plot, Section, Series
from ...report.section import Table as Shown
from ...report.settings import Settings
from ...testing.threads import one_thread
from .long import long
from .measure import Measurement, Table
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


def tables_of(settings: Settings) -> tuple[str, ...]:
    """The names of the tables, in order."""
    if not settings.further_tables:
        return QUICK
    return FURTHER + ON_A_GPU if settings.device.type == "cuda" else FURTHER


def ladder(settings: Settings, advance: Callable[[], None]) -> Section:
    tables = {}
    with on(settings.device), one_thread():  # as the steps before PyTorch's have it
        for name in tables_of(settings):
            tables[name] = finished(measurement(name, settings))
            advance()
    steps, most = tables["stack"], settings.stack_seqlens[-1]
    return Section(
        name="ladder",
        title="The ladder: from pure Python to this library",
        summary="Forward of one head at d = 16, on one thread, in every step that runs here; "
        f"at N = {most} from {span_of(steps, most)}. "
        "The steps are files to be read, in flashtile/ladder; docs/ladder.md explains them.",
        plots=[plot_of(steps)],
        tables=[shown(table) for table in tables.values() if table.rows],
        notes=[note for table in tables.values() for note in table.notes],
        records=[{"table": name} | row for name, table in tables.items() for row in table.rows],
        ok=all(row["error"] < 1e-2 for row in steps.rows),
    )


def measurement(name: str, settings: Settings) -> Measurement:
    if name == "stack":
        return stack(settings.device, settings.stack_seqlens, settings.ladder_seconds)
    if name == "long":
        return long(settings.device, settings.long_seqlens, settings.ladder_seconds)
    return TABLES[name](settings.device)


def finished(work: Measurement) -> Table:
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def span_of(steps: Table, n: int) -> str:
    times = {row["step"]: row["ms"] for row in steps.rows if row["n"] == n}
    slow, fast = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
    return f"{in_figures(times[slow])} ms ({slow}) to {in_figures(times[fast])} ms ({fast})"


def plot_of(steps: Table) -> Plot:
    """Steps from top to bottom, a mark for each length."""
    names = tuple(dict.fromkeys(row["step"] for row in steps.rows))
    series = []
    for n in dict.fromkeys(row["n"] for row in steps.rows):
        own = [row for row in steps.rows if row["n"] == n]
        series.append(Series(f"N = {n}", [row["ms"] for row in own], [float(names.index(row["step"])) for row in own]))
    title = "Time of a forward pass, one head, d = 16 (less is better)"
    return Plot("ladder", title, series, "milliseconds", kind="dots", rows=names)


def shown(table: Table) -> Shown:
    """As `flashtile ladder` prints it, under words, without what is published elsewhere."""
    whole = pivoted([row | {"published_ms": None} for row in table.rows]) if table.name == "stack" else table.rows
    rows = [{name: x for name, x in row.items() if not name.startswith("published")} for row in whole]
    columns = tuple(heading(name) for name in rows[0])
    numbers = frozenset(i for i, x in enumerate(rows[0].values()) if not isinstance(x, str) or columns[i][:1] == "N")
    cells = [tuple(in_figures(x) or "–" for x in row.values()) for row in rows]
    return Shown(columns, cells, numbers, caption=table.title.partition(" (in brackets")[0])


def heading(name: str) -> str:
    """A column's heading for readers: those of a pivot, "N = 64", are words already."""
    return name if " " in name else HEADINGS[name]
