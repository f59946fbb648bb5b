"""Measured calls in a file of JSON lines, to which a run appends what is missing."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..backend.triton.constants import MOST_MMA
from ..bench.cell import Cell
from .sources import WIDE, digest


class Row(NamedTuple):
    """Microseconds of the plans of a call by their names: the median, the lowest but one and the highest but one."""

    cell: Cell
    device: str
    triton: str
    sources: dict[str, str]  # digests, by kind of kernels
    times: dict[str, list[float]]
    refused: dict[str, str]  # plans that do not run, and why

    @property
    def stale(self) -> bool:
        """Whether kernels have changed since."""
        return self.sources != sources_of(self.cell, self.sources)

    def to_json(self) -> str:
        default = Cell()
        cell = {x.name: getattr(self.cell, x.name) for x in fields(Cell)}
        kept = {name: value for name, value in cell.items() if value != getattr(default, name) and name != "source"}
        return json.dumps({**self._asdict(), "cell": kept}, separators=(",", ":"))

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Row":
        return cls(**{**row, "cell": Cell.from_dict(row["cell"])})


def sources_of(cell: Cell, kinds: Iterable[str]) -> dict[str, str]:
    return {kind: digest(kind, pass_of(cell)) for kind in kinds}


def pass_of(cell: Cell) -> str:
    name = "backward" if cell.differentiates else "tangents" if cell.moves else "forward"
    return WIDE + name if max(cell.head_dim, cell.width_v) > MOST_MMA else name


def read(path: Path) -> Iterator[Row]:
    """The rows of a file; none if there is no file."""
    if path.is_file():
        for line in path.read_text().splitlines():
            yield Row.of(json.loads(line))
