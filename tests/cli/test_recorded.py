"""The table of problems that `flashtile verify` has run, and what a run leaves that does not reach its end."""

import json
import shlex
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import Result, invoke

from flashtile import progress
from flashtile.cli import recorded
from flashtile.testing.tolerance import Deviation
from flashtile.verification import examine
from flashtile.verification.examine import Number, Outcome, Problems, is_lost


def run(*words: object) -> Result:
    return invoke(["verify", "--backend", "tiled", "--backend", "cpu", "--long", "0", *map(str, words)])


@pytest.fixture(autouse=True)
def problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """All right, but that `cpu` declines multiples of five and fails at 1000003; seeds from 1000008 on interrupt.
    Seed 50 loses the GPU in its variation 1; both backends decline seed 60.
    """

    def examined(problems: Problems, number: Number) -> list[Outcome]:
        seed = number.seed
        if seed >= 1_000_008:
            raise KeyboardInterrupt
        outcome = partial(Outcome, variation=number.variation)
        if number == (50, 1, False):
            return [outcome("tiled", seed, "float32", "", error="illegal access", device_lost=True)]
        if seed == 60:
            return [outcome(name, seed, "float32", "", declined="no") for name in problems.backends]
        right = outcome("tiled", seed, "float32", "", (Deviation("out", 0.5),))
        error, declined = "wrong" if seed == 1_000_003 else None, "no" if seed % 5 == 0 else None
        return [right, outcome("cpu", seed, "float32", "", error=error, declined=declined)]

    monkeypatch.setattr(examine, "examine_one", examined)
    monkeypatch.setattr(recorded, "commit", lambda: "0123456789ab")  # the package may lie outside of a checkout


def test_runs_add_up(tmp_path: Path) -> None:
    table = tmp_path / "verified.csv"
    assert run("--cases", 3, "--record", table).exit_code == 0
    assert run("--cases", 4, "--record", table).exit_code == 1  # with the failure
    rows = recorded.read(table)
    assert [(row.backend, row.first_seed, row.cases, row.runs, row.failed) for row in rows] == [
        ("tiled", 1_000_000, 3, 3, 0), ("cpu", 1_000_000, 3, 2, 0),
        ("tiled", 1_000_003, 4, 4, 0), ("cpu", 1_000_003, 4, 3, 1),
    ]  # fmt: skip
    assert all(row.commit and row.date and row.command and "torch" in row.versions for row in rows)
    shown = run("--recorded", table)
    assert shown.exit_code == 1
    assert [line.split()[:3] for line in shown.stdout.splitlines()[1:]] == [["cpu", "5", "1"], ["tiled", "7", "0"]]


def test_no_seed_counts_twice(tmp_path: Path) -> None:
    table = tmp_path / "verified.csv"
    run("--cases", 4, "--seed", 10, "--record", table)
    result = run("--cases", 4, "--seed", 7, "--record", table)
    assert result.exit_code == 2
    assert "from 14 on it has none" in result.stderr
    assert run("--cases", 3, "--seed", 7, "--record", table).exit_code == 0
    assert len(recorded.read(table)) == 4


def test_an_interruption_loses_nothing_that_was_run(tmp_path: Path) -> None:
    table = tmp_path / "verified.csv"
    assert run("--seed", 1_000_004, "--cases", 100, "--jobs", 1, "--record", table).exit_code != 0
    assert [(row.first_seed, row.cases) for row in recorded.read(table)] == [(1_000_004, 4)] * 2


def test_each_variation_is_a_problem(tmp_path: Path) -> None:
    table = tmp_path / "verified.csv"
    result = run("--cases", 4, "--variations", 3, "--record", table)
    assert "12 problems and 0 long ones" in result.stdout
    (row, cpu) = recorded.read(table)
    assert (row.first_seed, row.seeds, row.variations, row.cases, row.runs) == (1_000_000, 4, 3, 12, 12)
    assert (cpu.cases, cpu.runs, cpu.failed) == (12, 9, 3)
    assert "from 1000004 on it has none" in run("--cases", 1, "--seed", 1_000_003, "--record", table).stderr
    run("--cases", 1, "--record", table)
    assert recorded.read(table)[-1].first_seed == 1_000_004


def test_a_failure_names_its_variation() -> None:
    lines = run("--cases", 1, "--seed", 1_000_003, "--variations", 2).stdout.splitlines()
    again = [shlex.split(line.partition("flashtile verify ")[2]) for line in lines if "again:" in line]
    repeated = [json.loads(run(*words, "--json").stdout) for words in again]
    assert [[(x["seed"], x["variation"]) for x in found["failures"]] for found in repeated] == [
        [(1_000_003, 0)], [(1_000_003, 1)],
    ]  # fmt: skip
    assert "neither --variations nor --record" in run("--variation", 1, "--variations", 2).stderr


def test_a_seed_that_all_decline_has_one_problem(tmp_path: Path) -> None:
    run("--cases", 2, "--seed", 60, "--variations", 3, "--record", tmp_path / "verified.csv")
    (row, _) = recorded.read(tmp_path / "verified.csv")
    assert (row.seeds, row.cases, row.runs) == (2, 4, 3)


def test_a_lost_gpu_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeds before are recorded, and the failure is reported."""
    table = tmp_path / "verified.csv"
    result = run("--cases", 9, "--seed", 47, "--variations", 3, "--record", table)
    assert result.exit_code == 1
    assert "illegal access" in result.stdout
    assert "--variation 1 --seed 50" in result.stdout
    assert "the run ended there" in result.stdout
    assert [(row.first_seed, row.seeds, row.cases, row.failed) for row in recorded.read(table)] == [(47, 3, 9, 0)] * 2

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert not is_lost(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: torch.zeros(1).view(2))  # a RuntimeError
    assert is_lost(torch.device("cuda"))
    assert not is_lost(torch.device("cpu"))


def test_no_seed_begins_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, clock = tmp_path / "verified.csv", iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    result = run("--cases", 50, "--seconds", 4.5, "--record", table, "--jobs", 1)
    (row, _) = recorded.read(table)
    assert (result.exit_code, row.failed) == (0, 0)
    assert 0 < row.seeds < 5
    assert f"{row.seeds} of 50 seeds are complete" in result.stdout


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert "seeds: 1 of 2, 0 s\nseeds: 2 of 2, 0 s\n" in run("--cases", 2).stderr


def test_a_narrow_terminal_has_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    heading, *_ = run("--cases", 2).stdout.splitlines()
    assert heading.split() == ["backend", "dtype", "cases", "failed", "declined", "worst", "ratio", "of", "seed"]
