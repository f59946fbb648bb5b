"""Results as tables for a terminal: a line for each provider on each cell, then the rows without a speed."""

from collections.abc import Iterator

from ..text_table import TextTable
from .cell import MEASURES, Cell
from .results import DECLINED, FAILED, OK, WRONG, Results, Row, three_digits
from .rounds import Band

TITLES = {
    "forward": "Forward",
    "backward": "Backward",
    "decode": "Decode: bytes of K and V read",
    "first_call_cold": "First call in a fresh process, caches empty",
    "first_call_warm": "First call in a fresh process, caches filled",
    "forward_memory": "Peak memory of forward, beyond inputs and results",
    "backward_memory": "Peak memory of backward, beyond inputs and results",
}


def tables(results: Results) -> Iterator[TextTable]:
    for measure in MEASURES:
        cells = results.cells(measure)
        if cells:
            yield table(results, measure, cells)


def table(results: Results, measure: str, cells: list[Cell]) -> TextTable:
    unit, scale = unit_of(results, cells)
    host = any(row.host_seconds is not None for row in results.rows if row.cell in cells)
    reference = f"× {results.reference}" if results.reference else ""
    header = "", "median", "20%", "80%", reference, "host µs" if host else ""
    lines: list[tuple[str, ...]] = []
    for cell in cells:
        rows = [row for row in results.rows if row.cell == cell and row.status in (OK, WRONG)]
        lines.append((cell.label(),))
        for row in rows:
            lines.append((f"  {row.provider}", *entries(row, scale)))
    return TextTable(header, lines, frozenset(range(1, len(header))), f"{TITLES[measure]}, {unit}")


def entries(row: Row, scale: float) -> list[str]:
    figures = figure(row)
    if figures is None:
        return ["wrong"]
    texts = [three_digits(x / scale) for x in figures]
    if len(row.samples) == 1:
        texts[1:] = ["", ""]
    texts.append("" if row.ratio is None else f"{row.ratio.median:.2f}")
    return [*texts, "" if row.host_seconds is None else three_digits(row.host_seconds * 1e6)]


def figure(row: Row) -> Band | None:
    """The figure that rows are compared by: a rate if there is one, otherwise seconds or bytes."""
    return row.flops_per_second or row.bytes_per_second or row.value


def unit_of(results: Results, cells: list[Cell]) -> tuple[str, float]:
    """The unit in which the largest figure of the cells is at least one, and its scale."""
    rows = [row for row in results.rows if row.cell in cells]
    figures = [rate.median for row in rows if (rate := figure(row)) is not None]
    largest = max(figures, default=0.0)
    measure = cells[0].measure
    if measure in ("forward", "backward"):
        return ("TFLOP/s", 1e12) if largest >= 1e12 else ("GFLOP/s", 1e9)
    if measure == "decode":
        return "GB/s", 1e9
    if measure.endswith("memory"):
        return ("GiB", 2**30) if min(figures, default=0) >= 2**30 else ("MiB", 2**20)
    return "s", 1.0


def reasons(results: Results) -> Iterator[tuple[str, str, str, int]]:
    """Status, provider, reason and number of cells, for rows without a speed; wrong results first."""
    counted: dict[tuple[str, str, str], int] = {}
    for row in results.rows:
        if row.status != OK:
            key = row.status, row.provider, row.reason
            counted[key] = counted.get(key, 0) + 1
    order = {WRONG: 0, FAILED: 1, DECLINED: 2}
    for (status, provider, reason), n in sorted(counted.items(), key=lambda item: order[item[0][0]]):
        yield status, provider, reason, n
