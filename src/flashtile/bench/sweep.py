"""Sweeps as data: a TOML file says which cells are measured, by which providers, and how often.

    name = "H200, forward"
    providers = ["flashtile", "sdpa:cudnn", "fa3"]
    reference = "sdpa:cudnn"                   # the denominator of per-round ratios
    [timing]
    rounds = 7
    sample_seconds = 0.1                       # of each provider in each round, at least
    rest_seconds = 0.02                        # before each sample
    [defaults]
    dtype = "bfloat16"
    [[cells]]                                  # one combination of every list below
    measure = ["forward", "backward"]
    seqlen_q = [1024, 4096]
    tokens = 16384                             # batch = tokens / seqlen_q
    window = [[1023, 0], [-1, -1]]             # a field that is a list itself takes a list of lists

All fields of `Cell` are allowed in `defaults` and `cells`. `quick = ["GPT-2"]` names models for reports,
`specialists = ["flex"]` providers that only take part in cells with scores or masks of their own.
"""

import itertools
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .cell import Cell

LISTS = ("window", "lengths")
ENTRIES = {"name", "providers", "reference", "timing", "defaults", "cells", "quick", "specialists"}


@dataclass(frozen=True)
class Timing:
    """Times of a cell: each sample is a number of calls back to back, at least `sample_seconds` long."""

    rounds: int = 7
    sample_seconds: float = 0.05
    rest_seconds: float = 0.02
    fresh_runs: int = 3  # processes for each figure that needs a fresh one
    most_seconds: float | None = None  # time of one cell; then rounds after the third are left out
    short_seconds: float | None = None  # shorter calls of a GPU are timed in a CUDA graph, and eagerly too
    cell_seconds: float | None = None  # time of a cell's preparation; providers that come later are left out


@dataclass(frozen=True)
class Sweep:
    name: str
    cells: tuple[Cell, ...]
    providers: tuple[str, ...] = ()  # empty: all
    reference: str | None = None
    timing: Timing = Timing()
    quick: tuple[str, ...] = ()  # models of which a report measures the cells
    specialists: tuple[str, ...] = ()  # providers that are asked for cells with scores or masks of their own only

    def on(self, device: str) -> "Sweep":
        """The cells for a kind of device; the quick ones come first."""
        cells = [cell for cell in self.cells if cell.device in ("", device)]
        return replace(self, cells=tuple(sorted(cells, key=lambda cell: cell.model not in self.quick)))

    def only(self, filters: tuple[str, ...]) -> "Sweep":
        """The cells that match one of the filters; all cells without filters.

        Raises:
            ValueError: a filter names no field of a cell, or nothing is left.
        """
        kept = tuple(cell for cell in self.cells if not filters or any(matches(cell, text) for text in filters))
        if not kept:
            raise ValueError(
                f"no cell of sweep {self.name!r} is left by {' or '.join(map(repr, filters)) or 'its file'}"
            )
        return replace(self, cells=kept)


def load(path: Path) -> Sweep:
    """The sweep of a TOML file.

    Raises:
        ValueError: the file is not TOML, or a field is invalid.
    """
    try:
        data = tomllib.loads(path.read_text())
        if unknown := data.keys() - ENTRIES:
            raise ValueError(f"there is no entry {', '.join(sorted(unknown))} in a sweep")
        timing = Timing(**data.get("timing", {}))
        tables = [data.get("defaults", {}) | table for table in data["cells"]]
        cells = tuple(dict.fromkeys(cell for table in tables for cell in expand(table)))
        providers, reference = tuple(data.get("providers", ())), data.get("reference")
        quick = tuple(data.get("quick", ()))
        if unknown := set(quick) - {cell.model for cell in cells}:
            raise ValueError(f"there is no model {', '.join(sorted(unknown))}")
        if providers and reference is not None and reference not in providers:
            raise ValueError(f"the reference {reference!r} is none of the providers")
    except (tomllib.TOMLDecodeError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error
    name, specialists = data.get("name", path.stem), tuple(data.get("specialists", ()))
    return Sweep(name, cells, providers, reference, timing, quick, specialists)


def expand(table: dict[str, Any]) -> list[Cell]:
    """One cell for each combination of the table's lists; the last list changes fastest."""
    choices = {name: value if is_choice(name, value) else [value] for name, value in table.items()}
    cells = []
    for combination in itertools.product(*choices.values()):
        values = dict(zip(choices, combination, strict=True))
        tokens = values.pop("tokens", None)
        if tokens is not None:
            values["batch"] = max(1, tokens // values["seqlen_q"])
        if values.get("lengths"):
            values |= {"batch": len(values["lengths"]), "seqlen_q": max(values["lengths"])}
        cells.append(Cell.from_dict(values))
    return cells


def is_choice(name: str, value: Any) -> bool:
    return isinstance(value, list) and (name not in LISTS or (bool(value) and isinstance(value[0], list)))


def matches(cell: Cell, text: str) -> bool:
    """Whether every condition holds: "measure=forward|backward head_dim=64 causal=true". A model's name is matched by
    a part of it: "model=gpt|llama".
    """
    values = cell.as_dict()
    for condition in text.replace(",", " ").split():
        name, _, wanted = condition.partition("=")
        if name not in values or not wanted:
            raise ValueError(f"{condition!r} is not FIELD=VALUE with a field of a cell: {', '.join(values)}")
        value, allowed = str(values[name]).lower(), wanted.lower().split("|")
        if value not in allowed and not (name == "model" and any(part in value for part in allowed)):
            return False
    return True
