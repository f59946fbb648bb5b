"""What calls lose with fewer kernels, by the measured times of all ways to run them:

    python benchmarks/fewer_kernels.py [--store benchmarks/results/candidates-h100.jsonl]

A family has the dense calls of one head dimension and pass without features, causal or not. Kernels leave it one after
another, each time the one that costs least in the mean; a call then takes the fastest way that is left. The table has
the mean and the largest loss, the number of calls that lose more than 5%, and of those that were at least 0.97 of the
best other library's speed in `gpu-models.jsonl` and are no more. Ways that differ in arguments alone are one kernel.
"""

import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import torch

from flashtile.bench.cell import Cell
from flashtile.calibrate.candidates import Subject, plans
from flashtile.calibrate.store import Row, read
from flashtile.call.device import Device, meta_tensors_on

RESULTS = Path(__file__).parent / "results"
FAMILIES = ((64, "forward"), (64, "backward"), (128, "forward"), (128, "backward"))
FEW = 16  # queries of calls that are a kind of their own
SLOWER, LEAD = 0.05, 0.97
CORES = 132
NUMBERS = re.compile(r" heads \d+| shared 1x1x1\b| last 1\b| splits 1\b")
COLUMNS = ("family", "kernels", "mean", "largest", "above 5%", "no longer 0.97", "goes next")


class Family(NamedTuple):
    """Calls, the best time of each by kernel, and the speed of the best other library's where it is known."""

    cells: list[Cell]
    times: list[dict[str, float]]
    leads: list[float | None]


def kernel_of(way: str) -> str:
    """A way without what its kernel takes as arguments."""
    name = NUMBERS.sub("", way)
    name = re.sub(r" shared \d+x\d+x\d+", " shared", name)
    return re.sub(r" (last|splits) \d+", r" \1", name)


def leads() -> dict[Cell, float]:
    """The time of the best other library relative to ours."""
    found = {}
    for line in (RESULTS / "gpu-models.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "cell" in row:
            times = {x["provider"]: statistics.median(x["samples"]) for x in row["rows"] if x["status"] == "ok"}
            if len(times) > 1 and "flashtile" in times:
                ours = times.pop("flashtile")
                found[anonymous(Cell.from_dict(row["cell"]))] = min(times.values()) / ours
    return found


def anonymous(cell: Cell) -> Cell:
    return replace(cell, model="", source="", device="")


def times_of(row: Row) -> dict[str, float]:
    """The measured times of the ways that are candidates, by name."""
    with meta_tensors_on(Device("cuda", row.device, "sm_90", CORES)):
        names = {name for name, _ in plans(Subject.of(row.cell, torch.device("meta")), every=True)}
    return {name: middle for name, (middle, *_) in row.times.items() if name in names}


def family_of(store: Path, head_dim: int, measure: str) -> Family:
    known, family = leads(), Family([], [], [])
    for row in read(store):
        cell = row.cell
        plain = not (cell.is_special or cell.dropout) and cell.dtype in ("bfloat16", "float16")
        if not plain or (cell.head_dim, cell.width_v, cell.measure) != (head_dim, head_dim, measure):
            continue
        if cell.seqlen_q <= FEW:
            continue
        best: defaultdict[str, float] = defaultdict(lambda: float("inf"))
        for way, middle in times_of(row).items():
            best[kernel_of(way)] = min(best[kernel_of(way)], middle)
        family.cells.append(cell)
        family.times.append(dict(best))
        family.leads.append(known.get(anonymous(cell)))
    return family


def losses(family: Family, kept: set[str]) -> list[float] | None:
    """The loss of each call; `None` if a call cannot run any more."""
    found = []
    for times in family.times:
        left = [time for kernel, time in times.items() if kernel in kept]
        if not left:
            return None
        found.append(min(left) / min(times.values()) - 1)
    return found


def removals(family: Family) -> Iterator[tuple[list[float], set[str], str]]:
    """Losses, the kernels that are left, and the one that goes next, which costs least."""
    kept = {kernel for times in family.times for kernel in times}
    current = losses(family, kept)
    while current is not None:
        others = {kernel: losses(family, kept - {kernel}) for kernel in sorted(kept)}
        mean = {kernel: statistics.mean(found) for kernel, found in others.items() if found is not None}
        if not mean:
            break
        least = min(mean, key=lambda kernel: mean[kernel])
        yield current, set(kept), least
        kept.discard(least)
        current = others[least]
    if current is not None:
        yield current, kept, ""


def table(store: Path) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for head_dim, measure in FAMILIES:
        family = family_of(store, head_dim, measure)
        steps = list(removals(family))
        # Kernels that no call needs leave first: one line tells of all.
        first = max(n for n, (found, _, _) in enumerate(steps) if max(found) < 1e-9)
        for found, kept, least in steps[first:]:
            lost = sum(
                lead is not None and lead >= LEAD > lead / (1 + x) for x, lead in zip(found, family.leads, strict=True)
            )
            name = f"{measure}, {head_dim} features, {len(found)} calls" if found is steps[first][0] else ""
            numbers = (f"{statistics.mean(found):.2%}", f"{max(found):.0%}", sum(x > SLOWER for x in found), lost)
            lines.append(f"| {' | '.join(map(str, (name, len(kept), *numbers, least)))} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--store", type=click.Path(exists=True, path_type=Path), default=RESULTS / "candidates-h100.jsonl")
def main(store: Path) -> None:
    click.echo(table(store))


if __name__ == "__main__":
    main()
