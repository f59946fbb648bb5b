"""Measured calls in a file of JSON lines, to which a run appends what is missing."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..bench.cell import Cell
from .candidates import BACKENDS
from .sources import digest


class Row(NamedTuple):
    """Microseconds of the plans of a call by their names: the median, the lowest but one and the highest but one."""

    cell: Cell
    device: str
    triton: str
    sources: dict[str, str]  # digests, by backend
    times: dict[str, list[float]]
    refused: dict[str, str]  # plans that do not run, and why

    @property
    def stale(self) -> bool:
        """Whether kernels have changed since."""
        return self.sources != sources_of(self.cell)

    def to_json(self) -> str:
        default = Cell()
        cell = {x.name: getattr(self.cell, x.name) for x in fields(Cell)}
        kept = {name: value for name, value in cell.items() if value != getattr(default, name) and name != "source"}
        return json.dumps({**self._asdict(), "cell": kept}, separators=(",", ":"))

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Row":
        return cls(**{**row, "cell": Cell.from_dict(row["cell"])})


def sources_of(cell: Cell) -> dict[str, str]:
    return {backend: digest(backend, cell.differentiates) for backend in BACKENDS}


def read(path: Path) -> Iterator[Row]:
    """The rows of a file; none if there is no file."""
    if path.is_file():
        for line in path.read_text().splitlines():
            yield Row.of(json.loads(line))
