"""Results: one row for each provider and cell, and the CSV tables and JSON made of them."""

import csv
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .cell import MEMORIES, TIMED, Cell
from .rounds import Band, band

OK, DECLINED, WRONG, FAILED = "ok", "declined", "wrong", "failed"


@dataclass
class Row:
    """One provider on one cell. `samples` are seconds of one call, or bytes; one for each round or process.

    A row whose status is not "ok" has no samples; `reason` says why.
    """

    cell: Cell
    provider: str
    status: str = OK
    reason: str = ""
    detail: str = ""  # the provider's choice
    checked: str = ""  # which elements were compared with the oracle
    error_ratio: float | None = None  # the worst error in units of its bound
    timing: str = ""  # how seconds were measured
    calls: int | None = None  # in one sample
    samples: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)  # speed in units of the reference's, round by round
    host_seconds: float | None = None
    eager: list[float] = field(default_factory=list)  # seconds of a short call, host and device together
    resident_bytes: float | None = None  # growth of the process: memory on a CPU
    clocks: dict[str, Any] = field(default_factory=dict)  # read after the cell's last round

    @property
    def unit(self) -> str:
        return "bytes" if self.cell.measure in MEMORIES else "s"

    @property
    def value(self) -> Band | None:
        return band(self.samples) if self.samples else None

    @property
    def ratio(self) -> Band | None:
        return band(self.ratios) if self.ratios else None

    @property
    def flops_per_second(self) -> Band | None:
        """Operations of visible pairs per second, forward or backward."""
        timed = self.value if self.cell.measure in ("forward", "backward") else None
        return timed and timed.map(lambda seconds: self.cell.flops / seconds)

    @property
    def bytes_per_second(self) -> Band | None:
        """Bytes of K and V per second, in decoding."""
        timed = self.value if self.cell.measure == "decode" else None
        return timed and timed.map(lambda seconds: self.cell.kv_bytes / seconds)

    def as_dict(self) -> dict[str, Any]:
        """All fields that are not absent, without the cell."""
        return {name: x for name, x in asdict(self).items() if name != "cell" and x not in (None, "", [], {})}

    def as_record(self) -> dict[str, Any]:
        """A flat dict: one line of results.csv."""
        record = self.cell.as_dict() | {
            "window": words(self.cell.window),
            "lengths": words(self.cell.lengths),
            "provider": self.provider,
            "detail": self.detail,
            "status": self.status,
            "reason": self.reason,
            "checked": self.checked,
            "error_ratio": self.error_ratio,
            "timing": self.timing,
            "calls": self.calls,
            "rounds": len(self.samples),
            "unit": self.unit,
        }
        bands = {"value": self.value, "ratio": self.ratio}
        bands |= {"flops_per_second": self.flops_per_second, "bytes_per_second": self.bytes_per_second}
        for name, quantiles in bands.items():
            record |= {f"{name}{end}": x for end, x in zip(("", "_p20", "_p80"), quantiles or (None,) * 3, strict=True)}
        eager = band(self.eager) if self.eager else (None,) * 3
        record |= {f"eager_seconds{end}": x for end, x in zip(("", "_p20", "_p80"), eager, strict=True)}
        record |= {"host_seconds": self.host_seconds, "resident_bytes": self.resident_bytes}
        return record | {f"clock {name}": x for name, x in self.clocks.items()}


def words(numbers: tuple[int, ...] | None) -> str:
    return " ".join(map(str, numbers or ()))


@dataclass
class Results:
    """All rows of a sweep and their origin."""

    sweep: str
    reference: str | None
    about: dict[str, Any]  # machine, versions, commit, command, clocks at start and end
    rows: list[Row] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_record() | {"samples": row.samples, "ratios": row.ratios} for row in self.rows]
        return {"sweep": self.sweep, "reference": self.reference, "about": self.about, "rows": rows}

    def write(self, folder: Path) -> list[Path]:
        """`results.json` with everything, `results.csv` with a line for each row, `samples.csv` for each sample."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / name for name in ("results.json", "results.csv", "samples.csv")]
        paths[0].write_text(json.dumps(self.as_dict(), indent=1, default=str) + "\n")
        write_csv(paths[1], [row.as_record() for row in self.rows])
        write_csv(paths[2], [line for row in self.rows for line in sample_lines(row)])
        return paths

    def cells(self, *measures: str) -> list[Cell]:
        """Cells in the order of measurement."""
        return list(dict.fromkeys(row.cell for row in self.rows if row.cell.measure in (measures or TIMED)))


def three_digits(x: float | None) -> str:
    """A figure with three digits: 1,234, 56.7, 0.0123, 1.2e-05; empty for `None`."""
    if x is None:
        return ""
    if abs(x) >= 100:
        return f"{x:,.0f}"
    return f"{x:.3g}"


def sample_lines(row: Row) -> list[dict[str, Any]]:
    known = {"measure": row.cell.measure, "cell": row.cell.label(), "provider": row.provider, "unit": row.unit}
    ratios = [*row.ratios, *[None] * (len(row.samples) - len(row.ratios))]
    pairs = zip(row.samples, ratios, strict=True)
    return [known | {"round": n, "value": x, "ratio": ratio} for n, (x, ratio) in enumerate(pairs)]


def write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for record in records for name in record))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(records)
