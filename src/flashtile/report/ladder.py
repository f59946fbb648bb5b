"""The course `flashtile_ladder`, where it is installed: attention step by step, on this machine.

This is the only place that looks for the course.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

from .section import Plot, Section, Series, Table
from .settings import Settings

TITLE = "The ladder: from pure Python to this library"
MISSING = "Not installed: `pip install flashtile-ladder` adds attention in small steps, each measured here."


def course() -> Any:
    """The course's tables for reports, or `None` where it is not installed."""
    if importlib.util.find_spec("flashtile_ladder") is None:
        return None
    return importlib.import_module("flashtile_ladder.cli.report")


def ladder(settings: Settings, advance: Callable[[], None]) -> Section:
    """A section of the course's tables, or one sentence."""
    found = course()
    if found is None:
        return Section("ladder", TITLE, MISSING)
    tables = {}
    for table in found.tables(settings.device, settings.quick):
        tables[table.name] = table
        advance()
    steps = tables["stack"]
    most = max(row["n"] for row in steps.rows)
    times = {row["step"]: row["ms"] for row in steps.rows if row["n"] == most}
    slow, fast = max(times, key=times.__getitem__), min(times, key=times.__getitem__)
    return Section(
        name="ladder",
        title=TITLE,
        summary="Forward of one head at d = 16, on one thread, in every step that runs here; "
        f"at N = {most} from {times[slow]:.3g} ms ({slow}) to {times[fast]:.3g} ms ({fast}). "
        "The steps are files to be read, in flashtile_ladder; its docs/ladder.md explains them.",
        plots=[plot_of(steps.rows)],
        tables=[shown(found.cells(table)) for table in tables.values() if table.rows],
        notes=[note for table in tables.values() for note in table.notes],
        records=[{"table": name} | row for name, table in tables.items() for row in table.rows],
        ok=all(row["error"] < 1e-2 for row in steps.rows),
    )


def plot_of(rows: list[dict[str, Any]]) -> Plot:
    """Steps from top to bottom, a mark for each length."""
    names = tuple(dict.fromkeys(row["step"] for row in rows))
    series = []
    for n in dict.fromkeys(row["n"] for row in rows):
        own = [row for row in rows if row["n"] == n]
        series.append(Series(f"N = {n}", [row["ms"] for row in own], [float(names.index(row["step"])) for row in own]))
    title = "Time of a forward pass, one head, d = 16 (less is better)"
    return Plot("ladder", title, series, "milliseconds", kind="dots", rows=names)


def shown(cells: Any) -> Table:
    return Table(cells.columns, cells.rows, cells.numbers, caption=cells.caption)
