"""The choice of kernels on an H100, against measured times of all ways to run 581 calls."""

import statistics
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from flashtile.calibrate.candidates import Subject, plans
from flashtile.calibrate.store import Row, read
from flashtile.call.device import Device, meta_tensors_on

STORE = Path(__file__).parents[2] / "benchmarks" / "results" / "candidates-h100.jsonl"
H100 = Device("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132)
MOST_STALE = 0.2  # of the rows
MEAN, FAR = 0.015, 0.08  # of the best time
MOST_FAR = 0.06  # of the calls
ALONE = 0.4  # of the best time, of any call


class Choice(NamedTuple):
    row: Row
    loss: float  # of the best time


@pytest.fixture(scope="module")
def choices() -> list[Choice]:
    return [Choice(row, loss(row)) for row in read(STORE)]


def loss(row: Row) -> float:
    """What the chosen plan takes more than the best one."""
    with meta_tensors_on(H100):
        subject = Subject.of(row.cell, torch.device("meta"))
        expected = {name: plan.microseconds for name, plan in plans(subject, every=True) if name in row.times}
    chosen = min(expected, key=lambda name: expected[name])
    return row.times[chosen][0] / min(times[0] for name, times in row.times.items() if name in expected) - 1


def test_rows_are_of_these_kernels() -> None:
    rows = list(read(STORE))
    stale = [row.cell.label() for row in rows if row.stale]
    assert len(rows) >= 400
    assert len(stale) <= MOST_STALE * len(rows), "measure again: flashtile calibrate --store"


def test_chosen_plans_are_near_the_best(choices: list[Choice]) -> None:
    losses = [choice.loss for choice in choices]
    assert statistics.mean(losses) < MEAN
    assert sum(loss > FAR for loss in losses) < MOST_FAR * len(losses)
    assert [choice.row.cell.label() for choice in choices if choice.loss > ALONE] == []


@pytest.mark.parametrize("measure", ["forward", "decode", "backward"])
def test_no_kind_of_call_is_worse(choices: list[Choice], measure: str) -> None:
    losses = [choice.loss for choice in choices if choice.row.cell.measure == measure]
    assert len(losses) > 20
    assert statistics.mean(losses) < 2 * MEAN
