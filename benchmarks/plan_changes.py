"""The plans of all calls of the sweeps, of stored measurements, and of random problems, without a GPU:

    python benchmarks/plan_changes.py dump BEFORE.json
    python benchmarks/plan_changes.py dump AFTER.json
    python benchmarks/plan_changes.py compare BEFORE.json AFTER.json

`dump` takes a minute, with the sources that are imported; `compare` says whose plan, by backend, is another one, and by
how much the expected time differs, and how many have the same plan but other candidates behind it.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any
from unittest import mock

import click
import torch

from flashtile.bench.sweep import load
from flashtile.calibrate.candidates import BACKENDS, Subject
from flashtile.calibrate.store import read
from flashtile.call.call import Needs
from flashtile.call.device import Device, meta_tensors_on
from flashtile.call.plan import Candidate
from flashtile.call.problem import Problem
from flashtile.dispatch.planner import SUPPORT, candidates_of, declines_on_device

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from random_problems import H100, OTHERS, random_problem  # noqa: E402

DEVICES = (
    H100, Device("cuda", "NVIDIA H200", "sm_90", 132), Device("cuda", "sm_80 on NVIDIA H200", "sm_80", 132),
    Device("cuda", "NVIDIA B200", "sm_100", 148, 1965.0, 8.0e6), *OTHERS,
)  # fmt: skip
SWEEPS = (
    "models",
    "other-shapes",
    "wide-heads",
    "features",
    "mma-sync",
    "h200-forward",
    "h200-backward",
    "h200-decode",
)
STORES, SEEDS, QKV = ("h100", "h200", "sm80"), 400, Needs(True, True, True)
Pass = tuple[Problem, Needs | None, Needs | None]


def passes() -> Iterator[tuple[str, Pass]]:
    """Problems with the gradients that they need, and the inputs that move in forward mode, by name."""
    cells = {
        f"{name}: {x.measure} {x.label()}": x for name in SWEEPS for x in load(ROOT / f"benchmarks/{name}.toml").cells
    }
    stores = (ROOT / f"benchmarks/results/candidates-{name}.jsonl" for name in STORES)
    cells |= {f"stored: {row.cell.measure} {row.cell.label()}": row.cell for store in stores for row in read(store)}
    for name, cell in cells.items():
        if cell.device != "cpu":
            with meta_tensors_on(H100):
                subject = Subject.of(cell, torch.device("meta"))
                yield name, (subject.problem, subject.needs, subject.moves)
    for seed in range(SEEDS):
        problem = random_problem(seed).bucketed()
        wide = random_problem(seed, head_dim=512, head_dim_v=512).bucketed()
        for kind, p in {"": problem, " invariant": replace(problem, batch_invariant=True), " wide": wide}.items():
            for way, pair in {"forward": (None, None), "backward": (QKV, None), "tangents": (None, QKV)}.items():
                yield f"random {seed}{kind} {way}", (p, *pair)
            yield f"random {seed}{kind} second", (p, QKV, QKV)


def in_words(way: Candidate) -> str:
    return f"{way.tile!r} splits {way.num_splits}"


@click.group()
def main() -> None:
    """Plans of two source trees."""


@main.command()
@click.argument("file", type=Path)
def dump(file: Path) -> None:
    plans: dict[str, Any] = {}
    with mock.patch.multiple(SUPPORT["hopper"], unusable=lambda: None):
        for name, (problem, needs, moves) in passes():
            for device in DEVICES:
                for backend in BACKENDS:
                    if declines_on_device(backend, problem, device, needs, moves) is None:
                        ways = candidates_of(backend, problem, device, needs, moves)
                        found = [in_words(ways[0]), ways[0].microseconds, digest(ways)]
                        plans[f"{backend}, {device.name}, {name}"] = found
    file.write_text(json.dumps(plans))
    click.echo(f"{len(plans)} plans")


def digest(ways: list[Candidate]) -> str:
    lines = (f"{in_words(way)} {way.microseconds:.6g}" for way in ways)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


@main.command()
@click.argument("before", type=Path)
@click.argument("after", type=Path)
def compare(before: Path, after: Path) -> None:
    old, new = (json.loads(file.read_text()) for file in (before, after))
    other = {name: new[name][1] / old[name][1] - 1 for name in old.keys() & new.keys() if old[name][0] != new[name][0]}
    behind = sum(old[name][:2] == new[name][:2] and old[name][2] != new[name][2] for name in old.keys() & new.keys())
    click.echo(f"{len(old.keys() & new.keys())} plans of both, {len(old.keys() ^ new.keys())} of one alone")
    click.echo(f"{len(other)} are others, {behind} have other candidates behind them")
    if other:
        click.echo(f"expected time {mean(other.values()):+.2%} in the mean, at most {max(other.values()):+.2%}")
    for kind, count in Counter(name.rpartition(": ")[0] or name.split()[0] for name in other).most_common(20):
        click.echo(f"  {count} of {kind}")


if __name__ == "__main__":
    main()
