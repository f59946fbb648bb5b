"""Cells that are measured already, in a file: a sweep that was interrupted goes on behind them.

Each line is a cell with its rows as JSON, without absent fields. The last line of a cell counts, and a line that was
cut short by the end of its process is left out.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from .cell import Cell
from .results import Row

DIGITS = 6  # digits of seconds: more than a clock has


class Store:
    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[Cell, list[Row]]:
        """The rows of each cell, in the order in which cells were first measured."""
        return {cell: [Row(cell, **row) for row in values["rows"]] for cell, values in self.lines().items()}

    def lines(self) -> dict[Cell, dict[str, Any]]:
        """The last line of each cell that has rows."""
        found: dict[Cell, dict[str, Any]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else []:
            try:
                values = json.loads(line)
            except ValueError:
                continue
            cell = Cell.from_dict(values["cell"])
            found[cell] = values
            if not values["rows"]:
                del found[cell]
        return found

    def append(self, rows: Sequence[Row], about: dict[str, Any]) -> None:
        """Add one cell's rows; `about` has its commit, date and device."""
        self.write({"cell": compact(rows[0].cell), "rows": [rounded(row.as_dict()) for row in rows], **about})

    def forget(self, cells: Sequence[Cell]) -> None:
        """Count these cells as not measured."""
        for cell in cells:
            self.write({"cell": compact(cell), "rows": []})

    def devices(self) -> dict[Cell, str]:
        """The device on which each cell was measured."""
        return {cell: values.get("device", "") for cell, values in self.lines().items()}

    def about(self) -> dict[str, str]:
        """The first and the last commit and date, and all devices, of the cells."""
        lines = sorted(self.lines().values(), key=lambda x: x.get("date", ""))
        commits, dates, devices = (
            [*dict.fromkeys(x[name] for x in lines if x.get(name))] for name in ("commit", "date", "device")
        )
        return {"commit": span(commits), "date": span(dates), "device": " and ".join(devices)}

    def write(self, values: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        whole = not self.path.exists() or self.path.read_bytes()[-1:] in (b"", b"\n")
        with self.path.open("a") as file:
            file.write(("" if whole else "\n") + json.dumps(values) + "\n")

    def missing(self, cells: Sequence[Cell], providers: Sequence[str]) -> list[Cell]:
        """The cells without a row for each of the providers."""
        known = {cell: {row.provider for row in rows} for cell, rows in self.read().items()}
        return [cell for cell in cells if not known.get(cell, set()).issuperset(providers)]


def span(values: Sequence[str]) -> str:
    """The first and the last of the values, in words."""
    return " to ".join(dict.fromkeys([*values[:1], *values[-1:]]))


def compact(cell: Cell) -> dict[str, Any]:
    """The fields of a cell that differ from their defaults."""
    usual = {field.name: field.default for field in fields(Cell)}
    return {name: x for name, x in cell.as_dict().items() if x != usual[name]}


def rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [float(f"{x:.{DIGITS}g}") for x in value] if name in ("samples", "eager", "ratios") else value
        for name, value in values.items()
    }
