"""Speed: against sequence length in pictures, and of every timed call compared with the fastest other."""

import os
from collections.abc import Callable, Sequence

from ..bench.results import OK, WRONG, Row, three_digits
from ..bench.rounds import Band, band, ratios
from .cells import Kind, in_words, kinds
from .measured import OWN, label_of, reasons, rows_of, series_of
from .section import Plot, Section, Table
from .settings import Settings
from .tables import table_of
from .verdict import Comparison, tally

BUSY = 1.5  # load for each core; this process has caused 1 of it
CAPTION = (
    "Ratios are formed within rounds, where other load is nearly the same for both: their median may differ a little "
    "from the quotient of the medians."
)


def speed(settings: Settings, advance: Callable[[], None]) -> Section:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    measured = [(kind, rows_of(settings, kind, advance)) for kind in kinds(settings)]
    section = section_of(settings, measured)
    section.notes += busy(load)
    return section


def busy(load: float) -> list[str]:
    """A warning if other work takes the processors; `load` is the system's load before the measurement."""
    cores = os.cpu_count() or 1
    if load < BUSY * cores:
        return []
    return [f"The machine had other work (load {load:.1f} on {cores} cores): it can give more than these figures."]


def section_of(settings: Settings, measured: Sequence[tuple[Kind, list[Row]]]) -> Section:
    """The section of all rows, with plots of the first kind, the calls by length."""
    by_length, rows = measured[0][1], [row for _, some in measured for row in some]
    largest = max((x.median for row in by_length if (x := row.flops_per_second)), default=0.0)
    unit, scale = ("TFLOP/s", 1e12) if largest >= 1e12 else ("GFLOP/s", 1e9)
    comparisons = [x for kind, some in measured for x in compared(settings, kind.name, some)]
    cell = by_length[0].cell
    counted = tally(comparisons).capitalize() if comparisons else "Nothing could be compared"
    return Section(
        name="speed",
        title="Speed",
        summary=f"{counted}. Where nothing else is said, calls have {cell.heads} heads of {cell.head_dim}, causal, in "
        f"{cell.dtype}; those of the pictures have {cell.inputs} inputs. Every result is compared with the oracle "
        "before it is timed. FLOPs are those of visible pairs, 2.5 times as many backward. Lines are medians over "
        "interleaved rounds, bands 20% to 80%.",
        plots=[plot_of(by_length, measure, unit, scale) for measure in ("forward", "backward")],
        tables=[
            table_of(comparisons, CAPTION, f"All {len(comparisons)} calls, losses first"),
            length_table(by_length, unit, scale),
        ],
        notes=reasons(rows),
        records=[row.as_record() for row in rows],
        ok=not any(row.provider == OWN and row.status == WRONG for row in rows),
        comparisons=comparisons,
    )


def plot_of(rows: Sequence[Row], measure: str, unit: str, scale: float) -> Plot:
    lines = series_of([row for row in rows if row.cell.measure == measure], lambda row: row.flops_per_second, scale)
    return Plot(measure, f"{measure.capitalize()}, {unit} (more is better)", lines, "sequence length")


def compared(settings: Settings, group: str, rows: Sequence[Row]) -> list[Comparison]:
    """Each cell where flashtile and another ran, compared with the fastest other."""
    comparisons = []
    for cell in dict.fromkeys(row.cell for row in rows):
        ran = {row.provider: seconds_of(row) for row in rows if row.cell == cell and row.status == OK}
        others = [(band(x).median, name) for name, x in ran.items() if name.partition(":")[0] != OWN]
        if OWN in ran and others:
            other, peer = min(others)
            times, own = band(ratios(ran[OWN], ran[peer])), band(ran[OWN]).median
            case = in_words(cell, settings)
            comparisons.append(Comparison("speed", group, case, own, other, label_of(peer), *times))
    return comparisons


def seconds_of(row: Row) -> list[float]:
    """Seconds of a call, for each round: the device's or the host's time, whichever is longer. Decoding on a GPU is
    replayed from a CUDA graph, without the host.
    """
    host = 0.0 if row.cell.measure == "decode" else row.host_seconds or 0.0
    return [max(x, host) for x in row.samples]


def length_table(rows: Sequence[Row], unit: str, scale: float) -> Table:
    providers = list(dict.fromkeys(row.provider for row in rows))
    lines = []
    for cell in dict.fromkeys(row.cell for row in rows):
        by_provider = {row.provider: row for row in rows if row.cell == cell}
        figures = (entry(by_provider[name], scale) for name in providers)
        lines.append((cell.measure, f"{cell.seqlen_q:,}", *figures))
    columns = ("", "length", *(f"{label_of(name)}, {unit}" for name in providers))
    numbers = frozenset(range(1, len(columns)))
    return Table(columns, lines, numbers, "Median, and 20% to 80% of the rounds.", folded="The figures of the pictures")


def entry(row: Row, scale: float) -> str:
    rate: Band | None = row.flops_per_second
    if rate is None:
        return row.status
    median, low, high = (three_digits(x / scale) for x in rate)
    return f"{median} ({low}–{high})"
