"""Calls of real models: a dozen measured here, and all of a stored sweep, losses first.

The sweep is `benchmarks/models.toml` of the repository, its results are in the file of `flashtile bench --store`.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ..bench.cell import Cell
from ..bench.providers import make
from ..bench.results import OK, WRONG, Row
from ..bench.rounds import Band, band, ratios
from ..bench.run import Bench
from ..bench.store import Store
from ..bench.sweep import Sweep, Timing, load
from .measured import OWN, label_of
from .section import Section
from .settings import Settings
from .tables import IN_WORDS, table_of
from .verdict import Comparison, Verdict, count, losses_first, tally

FOLDER = Path(__file__).parents[3] / "benchmarks"
SWEEP = FOLDER / "models.toml"
STORED = {"cuda": FOLDER / "results" / "gpu-models.jsonl", "cpu": FOLDER / "results" / "cpu-models.jsonl"}
SLOW_TO_START = ("flex", "fa3")  # compiled, or not at hand: not in a quick report
EAGER = ", eager"
GROUPS = {
    "": "models",
    "scores": "models with scores of their own",
    "masks": "models with masks of their own",
}
Figures = Mapping[str, Sequence[float]]  # seconds of each provider, round by round


def models(settings: Settings, advance: Callable[[], None]) -> Section:
    """The section of the page. Outside of a checkout there is no sweep, which the section says."""
    if not SWEEP.exists():
        return Section(
            "models", "Real models", "The sweep of real models is a part of the repository, not of the package."
        )
    sweep = load(SWEEP).on(settings.device.type)
    dozen = [cell for cell in sweep.cells if cell.model in sweep.quick]
    measured: dict[Cell, list[Row]] = {}
    work = Bench(
        settings.device,
        make(peers(settings, sweep)),
        timing_of(settings, sweep),
        None,
        None,
        specialists=sweep.specialists,
    )
    start = time.perf_counter()
    for cell in dozen:
        if time.perf_counter() - start < settings.models_seconds:
            measured[cell] = list(work.run(Sweep("", (cell,)), lambda cell: advance()))
    store = Store(STORED.get(settings.device.type, STORED["cpu"]))
    stored = {cell: rows for cell, rows in store.read().items() if cell in sweep.cells}
    section = section_of(measured, stored, store.about())
    if len(measured) < len(dozen):
        section.notes.append(f"The time was up after {len(measured)} of {len(dozen)} cells.")
    return section


def timing_of(settings: Settings, sweep: Sweep) -> Timing:
    """The sweep's timing, with the rounds of this report."""
    return replace(sweep.timing, rounds=settings.timing.rounds, most_seconds=settings.timing.most_seconds)


def peers(settings: Settings, sweep: Sweep) -> list[str]:
    return [name for name in sweep.providers if settings.all_of_models or name not in SLOW_TO_START]


def section_of(measured: dict[Cell, list[Row]], stored: dict[Cell, list[Row]], about: dict[str, str]) -> Section:
    """The section of two sets of rows; `about` has the origin of those that are stored."""
    here, there = compared(measured), compared(stored)
    origin = f"measured on {about.get('device')}, {about.get('date')}, commit {about.get('commit')}"
    words = [f"Measured now, {means(here)}." if here else "Nothing could be compared now."]
    words += [f"Stored, {origin}: {means(there)}." if there else "No results of the whole sweep are stored."]
    tables = [table_of(here, "Measured now.")] if here else []
    tables += (
        [table_of(there, f"Stored: {origin}.", f"All {len(there)} stored comparisons, losses first")] if there else []
    )
    rows = [row for some in measured.values() for row in some]
    return Section(
        name="models",
        title="Real models",
        summary=" ".join(words),
        tables=tables,
        notes=absences(rows) + [f"Stored: {note}" for note in absences([row for x in stored.values() for row in x])],
        records=[row.as_record() for row in rows],
        ok=not any(row.provider == OWN and row.status == WRONG for row in rows),
        comparisons=here,
    )


def compared(stored: Mapping[Cell, Sequence[Row]]) -> list[Comparison]:
    """Each cell against the fastest other; a short one twice, by the device's time and by its eager time."""
    found = []
    for cell, rows in stored.items():
        ran = {row.provider: row for row in rows if row.status == OK and row.samples}
        group = GROUPS[cell.belongs_to]
        kinds: list[tuple[str, Figures]] = [("", {name: row.samples for name, row in ran.items()})]
        kinds += [(EAGER, {name: row.eager for name, row in ran.items() if row.eager})]
        for kind, seconds in kinds:
            comparison = against_fastest(f"{name_of_cell(cell)}{kind}", group + kind, seconds)
            found += [comparison] if comparison else []
    return found


def against_fastest(case: str, group: str, seconds: Figures) -> Comparison | None:
    """One comparison; `None` without others. Without a time of its own flashtile has the ratio 0."""
    others = [(band(x).median, name) for name, x in seconds.items() if name.partition(":")[0] != OWN]
    if not others:
        return None
    other, peer = min(others)
    if OWN not in seconds:
        return Comparison("speed", group, case, math.inf, other, label_of(peer), 0.0)
    times: Band = band(ratios(seconds[OWN], seconds[peer]))
    return Comparison("speed", group, case, band(seconds[OWN]).median, other, label_of(peer), *times)


def name_of_cell(cell: Cell) -> str:
    return f"{cell.model or cell.label()}, {cell.measure}"


def means(comparisons: Sequence[Comparison]) -> str:
    """Counts and geometric means of each group: "models: slower in 1 of 9, …, geometric mean 1.31"."""
    words = []
    for group in dict.fromkeys(x.group for x in comparisons):
        some = [x for x in comparisons if x.group == group]
        words.append(f"{group}: {tally(some)}, geometric mean {geometric_mean(some):.2f}")
    return "; ".join(words)


def geometric_mean(comparisons: Sequence[Comparison]) -> float:
    """Counts of the comparisons in which flashtile has a time."""
    logs = [math.log(x.ratio) for x in comparisons if x.ratio > 0]
    return math.exp(sum(logs) / len(logs)) if logs else 0.0


def absences(rows: Sequence[Row]) -> list[str]:
    """Providers without a figure, with the number of cells for each reason; wrong and failed ones with a cell."""
    counted: dict[tuple[str, str, str], list[Cell]] = {}
    for row in rows:
        if row.status != OK:
            counted.setdefault((row.provider, row.status, row.reason), []).append(row.cell)
    return [
        f"{label_of(name)} {status} in {len(cells)} of the cells, {name_of_cell(cells[0])} for example: {reason}"
        for (name, status, reason), cells in counted.items()
    ]


def lines_of(stored: Mapping[Cell, Sequence[Row]]) -> Iterator[str]:
    """All comparisons as lines for a terminal, losses first, then the absent providers and the means."""
    comparisons = compared(stored)
    for x in losses_first(comparisons):
        spread = f" ({x.low:.2f} to {x.high:.2f})" if x.low is not None else ""
        own, other = (IN_WORDS["speed"](seconds) for seconds in (x.own, x.other))
        yield f"{x.ratio:6.2f}{spread}  {x.case}  [{x.group}]  {own}, {x.peer} {other}"
    yield from absences([row for rows in stored.values() for row in rows])
    if comparisons:
        lost = count(comparisons, Verdict.WORSE)
        yield f"{lost} losses among {len(comparisons)} comparisons; {means(comparisons)}"
