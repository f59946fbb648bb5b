"""A table of seed ranges that `flashtile verify` has run, one row for each backend and run, for totals over runs."""

import csv
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from ..bench.origin import command_line, commit, device_name
from ..text_table import TextTable
from ..verification.examine import Problems, Report, dtype_name
from .env import cpu_name, packages
from .options import UsageError

FIRST_SEED = 1_000_000  # no test and no check of the project takes seeds from here on


class Row(NamedTuple):
    """A range of `seeds` from `first_seed` on, with up to `variations` problems each. The backend ran `runs` of the
    `cases` problems and declined the rest.
    """

    backend: str
    device: str
    dtypes: str
    inputs: str
    first_seed: int
    seeds: int
    variations: int
    cases: int
    runs: int
    failed: int
    commit: str
    versions: str
    date: str
    command: str

    @classmethod
    def from_record(cls, record: dict[str, str]) -> "Row":
        names = ("first_seed", "seeds", "variations", "cases", "runs", "failed")
        integers = {name: int(record[name]) for name in names}
        return cls(**record | integers)  # type: ignore[arg-type]

    @property
    def about(self) -> tuple[str, str, str, str]:
        """Key of a list of problems: rows with the same key must not share a seed."""
        return self.backend, self.device, self.dtypes, self.inputs

    @property
    def seed_range(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)


def read(path: Path) -> list[Row]:
    """All rows of a file; none if it does not exist."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [Row.from_record(record) for record in csv.DictReader(file)]


def rows_of(report: Report) -> list[Row]:
    """Rows for the backends, in the order of the command, without long problems and incomplete seeds."""
    problems = report.problems
    complete = [outcome for outcome in report.outcomes if not outcome.long and outcome.seed in problems.seeds]
    report = replace(report, outcomes=complete)
    rows = []
    for backend in problems.backends:
        tallies = [tally for tally in report.tallies() if tally.backend == backend]
        rows.append(
            Row(
                *about(problems, backend),
                problems.seeds.start,
                len(problems.seeds),
                len(problems.variations),
                sum(tally.cases + tally.declined for tally in tallies),
                sum(tally.cases for tally in tallies),
                sum(tally.failed for tally in tallies),
                commit() or "",
                versions(),
                datetime.now(UTC).date().isoformat(),
                command_line(),
            )
        )
    return rows


def about(problems: Problems, backend: str) -> tuple[str, str, str, str]:
    """`Row.about` of one backend's rows."""
    device = device_name(problems.device)
    device = f"{cpu_name()}, {device}" if problems.device.type == "cpu" else device
    dtypes = " ".join(map(dtype_name, problems.dtypes or ())) or "all"
    return backend, device, dtypes, "random" if problems.captured is None else "captured"


def versions() -> str:
    installed = {"torch": torch.__version__} | {name: packages()[name] for name in ("llvmlite", "triton")}
    return ", ".join(f"{name} {version}" for name, version in installed.items() if version is not None)


def prepare(path: Path, problems: Problems, first: int | None) -> Problems:
    """The problems; without a requested `first` seed, those that follow the table at `path`.

    Raises:
        UsageError: the table has some of them.
    """
    kinds = {about(problems, backend) for backend in problems.backends}
    known = [row for row in read(path) if row.about in kinds]
    free = max((row.seed_range.stop for row in known), default=FIRST_SEED)
    if first is None:
        return problems._replace(seeds=range(free, free + len(problems.seeds)))
    for row in known:
        if row.seed_range.start < problems.seeds.stop and problems.seeds.start < row.seed_range.stop:
            raise UsageError(f"{path} has some of these seeds for {row.backend}; from {free} on it has none")
    return problems


def append(path: Path, rows: list[Row]) -> None:
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(Row._fields)
        writer.writerows(rows)


def show(path: Path) -> int:
    """Print the totals of each backend on each device; 1 if a run failed."""
    runs: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    for row in read(path):
        runs[row.backend, row.device] += row.runs
        failed[row.backend, row.device] += row.failed
    rows = [(key[0], f"{runs[key]:,}", str(failed[key]), key[1]) for key in sorted(runs)]
    print(TextTable(("backend", "problems", "failed", "device"), rows, frozenset({1, 2})))
    return 1 if failed.total() else 0
