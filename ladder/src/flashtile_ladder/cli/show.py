"""Tables of `flashtile-ladder` in a terminal."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table as Printed

from .measure import Table, disturbed


def show_table(table: "Table") -> None:
    """The title, the sentence that says what to see, rows under their keys, and notes."""
    rows = PIVOTS.get(table.name, list)(table.rows)
    printed = Printed(box=None, pad_edge=False, header_style="bold")
    if rows:
        for heading in rows[0]:
            words = isinstance(rows[0][heading], str) and heading != "published"
            printed.add_column(heading.replace("_", "\n"), justify="left" if words else "right", no_wrap=words)
        for row in rows:
            printed.add_row(*(in_figures(value) for value in row.values()))
    console = Console()
    console.print(table.title, style="bold")
    if table.see:
        console.print(table.see, style="italic", highlight=False, markup=False)
    full_width = Console(width=10_000).measure(printed).maximum  # a terminal that is too narrow wraps the lines
    Console(width=max(console.width, full_width)).print(printed)
    warning = disturbed(table)
    for note in (*table.notes, *table.asides, *([warning] if warning else [])):
        console.print(note, highlight=False, markup=False)
    console.print()


def pivoted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each step: a column for each N, with the published time in brackets; then the longest N's time for
    a row of q, the largest error, and the largest median over the fastest.
    """
    steps: dict[str, dict[str, Any]] = {}
    for row in rows:
        published = "" if row["published_ms"] is None else f" ({row['published_ms']:.3f})"
        step = steps.setdefault(row["step"], {"step": row["step"]})
        step[f"N = {row['n']}"] = f"{in_figures(row['ms'])}{published}"
    for name, step in steps.items():
        own = [row for row in rows if row["step"] == name]
        step["µs a row"] = 1e3 * own[-1]["ms"] / own[-1]["n"]
        step["error"] = max(row["error"] for row in own)
        step["spread"] = max(row["median_ms"] / row["ms"] for row in own)
    return list(steps.values())


def dtypes_pivoted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each call but its length: a column for each N, milliseconds and percent of the roofline."""
    names = ("dtype", "heads", "mask", "pass", "step")
    lengths = dict.fromkeys(row["n"] for row in rows)
    calls: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in names)
        call = calls.setdefault(key, dict(zip(names, key, strict=True)) | {f"N = {n}": "" for n in lengths})
        call[f"N = {row['n']}"] = f"{in_figures(row['ms'])} ({row['roofline_percent']:.0f}%)"
    return list(calls.values())


PIVOTS: dict[str, Callable[[list[dict[str, Any]]], list[dict[str, Any]]]] = {
    "stack": pivoted,
    "dtypes": dtypes_pivoted,
}


def in_figures(value: Any) -> str:
    """Three figures of a number."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
