"""Speed against sequence length, forward and backward; and where we lose: every cell beside the fastest other."""

import os
from collections.abc import Callable
from typing import Any

from ..bench.cell import Cell
from ..bench.results import OK, WRONG, Row, three_digits
from ..bench.rounds import Band, band, ratios
from .measured import OWN, name_of, reasons, rows_of, series_of
from .section import Plot, Section, Series, Table
from .settings import Settings

DECODE_KEYS = 4096
BUSY = 1.5  # load for each core; this process has caused 1 of it


def cells(settings: Settings) -> list[Cell]:
    return [settings.speed_cell(n, measure) for measure in ("forward", "backward") for n in settings.seqlens]


def further_cells(settings: Settings) -> list[Cell]:
    """One feature at a time at the longest length that is not the last, and decoding."""
    seqlen = settings.seqlens[max(len(settings.seqlens) - 2, 0)]
    feature: dict[str, Any] = {"inputs": "normal", "measure": "forward"}
    heads_kv = max(1, settings.heads // 4)
    variants: list[dict[str, Any]] = [{"heads_kv": heads_kv}, {"window": (127, 0)}, {"bias": True}, {"alibi": True}]
    found = [settings.speed_cell(seqlen, **feature | variant) for variant in variants]
    decode: dict[str, Any] = {
        "seqlen_k": DECODE_KEYS,
        "heads_kv": heads_kv,
        "inputs": "normal",
        "batch": 1,
        "causal": False,
    }
    return [*found, settings.speed_cell(1, "decode", **decode)]


def speed(settings: Settings, advance: Callable[[], None]) -> tuple[Section, Section]:
    """The section on speed, and that on where we lose."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    rows = rows_of(settings, cells(settings), advance)
    further = rows_of(settings, further_cells(settings), advance)
    section = speed_section(rows)
    section.notes += busy(load)
    return section, losses_section([*rows, *further])


def busy(load: float) -> list[str]:
    """A word of warning where other work takes the processors; `load` is that of before."""
    cores = os.cpu_count() or 1
    if load < BUSY * cores:
        return []
    return [f"The machine had other work (load {load:.1f} on {cores} cores): it can give more than these figures."]


def speed_section(rows: list[Row]) -> Section:
    largest = max((found.median for row in rows if (found := row.flops_per_second)), default=0.0)
    unit, scale = ("TFLOP/s", 1e12) if largest >= 1e12 else ("GFLOP/s", 1e9)
    plots = []
    for measure in ("forward", "backward"):
        some = [row for row in rows if row.cell.measure == measure]
        lines = series_of(some, lambda row: row.flops_per_second, scale)
        title = f"{measure.capitalize()}, {unit} (more is better)"
        plots.append(Plot(measure, title, lines, "sequence length"))
    cell = rows[0].cell
    shape = f"{cell.heads} heads of {cell.head_dim}, causal, {cell.dtype}, {cell.inputs} inputs"
    wrong = [row for row in rows if row.status == WRONG]
    return Section(
        name="speed",
        title="Speed against sequence length",
        summary=f"{shape}. Every result is compared with the oracle before it is timed; FLOPs are those of visible "
        "pairs, 2.5 times as many backward. Lines are medians over rounds in which all take turns, bands 20% to 80%.",
        plots=plots,
        tables=[speed_table(rows, unit, scale)],
        notes=reasons(rows),
        records=[row.as_record() for row in rows],
        ok=not any(row.provider == OWN for row in wrong),
    )


def speed_table(rows: list[Row], unit: str, scale: float) -> Table:
    providers = list(dict.fromkeys(row.provider for row in rows))
    lines = []
    for cell in dict.fromkeys(row.cell for row in rows):
        found = {row.provider: row for row in rows if row.cell == cell}
        figures = (entry(found[name], scale) for name in providers)
        lines.append((cell.measure, f"{cell.seqlen_q:,}", *figures))
    columns = ("", "length", *(f"{name_of(name)}, {unit}" for name in providers))
    return Table(columns, lines, frozenset(range(1, len(columns))), "Median, and 20% to 80% of the rounds.")


def entry(row: Row, scale: float) -> str:
    found = row.flops_per_second
    if found is None:
        return row.status
    median, low, high = (three_digits(x / scale) for x in found)
    return f"{median} ({low}–{high})"


# Where we lose -------------------------------------------------------------------------------------------------------


def losses_section(rows: list[Row]) -> Section:
    """Each cell's speed in units of the fastest other provider, the worst first."""
    found = sorted(compared(rows), key=lambda item: item[3].median)
    lost = [item for item in found if item[3].high < 1]
    words = f"flashtile is slower than the fastest other in {len(lost)} of {len(found)} cells."
    if found:
        cell, peer, _, worst = found[0]
        words += f" Farthest behind: {worst.median:.2f} times the speed of {name_of(peer)}, {in_words(cell)}."
    dots = Series(
        "flashtile / fastest other",
        [item[3].median for item in found],
        [float(n) for n in range(len(found))],
        [item[3].low for item in found],
        [item[3].high for item in found],
    )
    plot = Plot(
        "losses",
        "Speed in units of the fastest other (1 is equal)",
        [dots],
        "times as fast",
        kind="dots",
        rows=tuple(in_words(cell) for cell, *_ in found),
        mark=1.0,
        caption="Ratios within rounds: median, and 20% to 80%.",
    )
    columns = ("cell", "fastest other", "flashtile, ms", "times as fast", "20%–80%")
    rows_in_words = [
        (in_words(cell), name_of(peer), three_digits(own.median * 1e3), f"{r.median:.2f}", f"{r.low:.2f}–{r.high:.2f}")
        for cell, peer, own, r in found
    ]
    return Section(
        name="losses",
        title="Where we lose",
        summary=words,
        plots=[plot] if found else [],
        tables=[Table(columns, rows_in_words, frozenset({2, 3, 4}))],
        notes=[words for words in reasons(rows) if words.startswith("flashtile")],
        records=[{"cell": c.label(), "measure": c.measure, "peer": peer, **r._asdict()} for c, peer, _, r in found],
    )


def compared(rows: list[Row]) -> list[tuple[Cell, str, Band, Band]]:
    """For each cell where both ran: the fastest other, our seconds, and the ratios within rounds."""
    found = []
    for cell in dict.fromkeys(row.cell for row in rows):
        ran = {row.provider: row for row in rows if row.cell == cell and row.status == OK}
        others = [(band(row.samples).median, name) for name, row in ran.items() if name.partition(":")[0] != OWN]
        if OWN in ran and others:
            peer = min(others)[1]
            own = ran[OWN].samples
            found.append((cell, peer, band(own), band(ratios(own, ran[peer].samples))))
    return found


def in_words(cell: Cell) -> str:
    """Short: "backward 2048 causal"; what all cells share is left out."""
    words = [cell.measure, str(cell.seqlen_q if cell.measure != "decode" else cell.keys)]
    words += ["grouped"] if cell.num_heads_kv != cell.heads and cell.measure != "decode" else []
    return " ".join([*words, *(x for x in cell.features() if x != "causal" and not x.endswith("inputs"))])
