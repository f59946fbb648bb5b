"""Stored runs of `flashtile-ladder`: a file for a CPU and one for an H200. docs/ladder_measurements.md is made of them.

    {"tables": {NAME: {"title", "rows", "notes", ..., "machine", "seconds"}}}

Each table says on which machine, when and under what load it was measured: tables may be measured one at a time.
"""

import json
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .options import representable

FOLDER = Path(__file__).parent / "results"
SLOW_SECONDS = 5.0  # a row that took longer is shown from the stored run


class StoredRow(NamedTuple):
    """One row of a stored table, and the seconds that measuring it took."""

    table: str
    row: dict[str, Any]
    seconds: float
    machine: dict[str, Any]


slow_rows: ContextVar[tuple[StoredRow, ...]] = ContextVar("slow_rows", default=())


def path_for(device: torch.device) -> Path:
    return FOLDER / ("h200.json" if device.type == "cuda" else "cpu.json")


def load(path: Path) -> dict[str, Any]:
    """The stored tables by name; none where there is no such file, or an empty one."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return json.loads(text)["tables"] if text else {}


def save(path: Path, name: str, table: dict[str, Any]) -> None:
    """Put one table into a file, in the place of an earlier one of that name."""
    tables = load(path) | {name: representable(rounded(table))}
    path.write_text(json.dumps({"tables": tables}, indent=1) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Six figures of each number: more say nothing of a time, and make files long."""
    if isinstance(value, dict):
        return {key: rounded(x) for key, x in value.items()}
    if isinstance(value, list):
        return [rounded(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def slow(tables: dict[str, Any]) -> tuple[StoredRow, ...]:
    """Rows that took longer than `SLOW_SECONDS`."""
    return tuple(
        StoredRow(name, row, seconds, table["machine"])
        for name, table in tables.items()
        for row, seconds in zip(table["rows"], table.get("row_seconds", ()), strict=False)
        if seconds > SLOW_SECONDS
    )
