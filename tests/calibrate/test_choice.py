"""The choice of kernels, against measured times of all ways to run calls: on an H100 and an H200, and as an sm_80 has
them.
"""

import statistics
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from flashtile.calibrate.candidates import Subject, plans
from flashtile.calibrate.store import Row, read
from flashtile.call.device import Device, meta_tensors_on

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MEASURED = {
    "h100": Device("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132),
    "h200": Device("cuda", "NVIDIA H200", "sm_90", 132),
    "sm80": Device("cuda", "sm_80 on NVIDIA H200", "sm_80", 132),
}
LEAST = {"h100": 500, "h200": 350, "sm80": 250}  # calls
MOST_STALE = 0.2  # of the rows
MEAN = {"h100": 0.008, "h200": 0.0115, "sm80": 0.0115}  # of the best time
FAR = 0.08  # of the best time
MOST_FAR = {"h100": 0.04, "h200": 0.05, "sm80": 0.05}  # of the calls
ALONE = 0.4  # of the best time, of any call
MOST_ALONE = {"h100": 1, "h200": 1, "sm80": 0}  # calls: packed sequences of few tokens, whose lengths no plan knows
MOST_UNKNOWN = 0.03  # of the calls, whose choice was not measured
LEAST_OF_KIND = {"h100": 20, "h200": 9, "sm80": 18}  # calls


class Choice(NamedTuple):
    chip: str
    row: Row
    loss: float  # of the best time


@pytest.fixture(scope="module", params=MEASURED)
def choices(request: pytest.FixtureRequest) -> list[Choice]:
    chip, rows = request.param, rows_of(request.param)
    losses = [loss(row, MEASURED[chip]) for row in rows]
    assert losses.count(None) <= MOST_UNKNOWN * len(rows)
    return [Choice(chip, row, x) for row, x in zip(rows, losses, strict=True) if x is not None]


def rows_of(chip: str) -> list[Row]:
    return list(read(RESULTS / f"candidates-{chip}.jsonl"))


def loss(row: Row, device: Device) -> float | None:
    """What the chosen plan takes more than the best one; `None` if it was not measured."""
    with meta_tensors_on(device):
        subject = Subject.of(row.cell, torch.device("meta"))
        found = [(name, plan) for name, plan in plans(subject, every=True) if name not in row.refused]
    first = {plan.backend: (plan.microseconds, name) for name, plan in reversed(found)}  # what a backend would take
    _, chosen = min(first.values())
    if chosen not in row.times:
        return None
    return row.times[chosen][0] / min(row.times[name][0] for name, _ in found if name in row.times) - 1


@pytest.mark.parametrize("chip", MEASURED)
def test_rows_are_of_these_kernels(chip: str) -> None:
    rows = rows_of(chip)
    stale = [row.cell.label() for row in rows if row.stale]
    assert len(rows) >= LEAST[chip]
    assert {row.device for row in rows} == {MEASURED[chip].name}
    assert len(stale) <= MOST_STALE * len(rows), "measure again: flashtile calibrate --store"


def test_chosen_plans_are_near_the_best(choices: list[Choice]) -> None:
    losses = [choice.loss for choice in choices]
    assert statistics.mean(losses) < MEAN[choices[0].chip]
    assert sum(loss > FAR for loss in losses) < MOST_FAR[choices[0].chip] * len(losses)
    alone = [choice.row.cell.label() for choice in choices if choice.loss > ALONE]
    assert len(alone) <= MOST_ALONE[choices[0].chip], alone


@pytest.mark.parametrize("measure", ["forward", "decode", "backward"])
def test_no_kind_of_call_is_worse(choices: list[Choice], measure: str) -> None:
    losses = [choice.loss for choice in choices if choice.row.cell.measure == measure]
    assert len(losses) >= LEAST_OF_KIND[choices[0].chip]
    assert statistics.mean(losses) < 2 * MEAN[choices[0].chip]
