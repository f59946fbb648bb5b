"""The ladder as a section of `flashtile report`: the tables of `flashtile ladder`, in a quick report fewer and shorter.

It is the command line that puts it there, since nothing else may import the ladder.
"""

from collections.abc import Callable
from typing import Any

from ..ladder.triton_or_not import on
from ..report.section import Plot, Section, Series
from ..report.section import Table as Shown
from ..report.settings import Settings
from ..verification import one_thread
from .ladder import EVERYWHERE, NAMES, in_figures, pivoted
from .ladder_measure import Measurement, Table
from .ladder_stack import stack
from .ladder_tables import TABLES, long

QUICK = ("stack", "long", "intensity")


def tables_of(settings: Settings) -> tuple[str, ...]:
    """The names of the tables, in order."""
    if not settings.further_tables:
        return QUICK
    return NAMES if settings.device.type == "cuda" else EVERYWHERE


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
        "The steps are files to be read, in flashtile/ladder; docs/ladder.md explains them. Published figures are "
        "those of teaching material, from other machines.",
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
    """Steps from top to bottom, a mark for each length; published times beside them."""
    names = tuple(dict.fromkeys(row["step"] for row in steps.rows))
    series, own = [], steps.rows
    for n in dict.fromkeys(row["n"] for row in steps.rows):
        own = [row for row in steps.rows if row["n"] == n]
        series.append(Series(f"N = {n}", [row["ms"] for row in own], [float(names.index(row["step"])) for row in own]))
    known = [row for row in own if row["published_ms"]]  # of the longest, which is where most is known
    if known:
        places = [float(names.index(row["step"])) for row in known]
        series.append(Series(f"published, N = {own[-1]['n']}", [row["published_ms"] for row in known], places))
    title = "Time of a forward pass, one head, d = 16 (less is better)"
    return Plot("ladder", title, series, "milliseconds", kind="dots", rows=names)


def shown(table: Table) -> Shown:
    """As `flashtile ladder` prints it."""
    rows: list[dict[str, Any]] = pivoted(table.rows) if table.name == "stack" else table.rows
    columns = tuple(name.replace("_", " ") for name in rows[0])
    numbers = frozenset(i for i, x in enumerate(rows[0].values()) if not isinstance(x, str) or columns[i][:1] == "N")
    cells = [tuple(in_figures(x) or "–" for x in row.values()) for row in rows]
    return Shown(columns, cells, numbers, caption=table.title)
