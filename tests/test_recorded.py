"""The table of problems that `flashtile verify` has run, and what a run leaves that does not reach its end."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flashtile import progress
from flashtile.cli import main, recorded
from flashtile.testing.tolerance import Deviation
from flashtile.verification import examine
from flashtile.verification.examine import Number, Outcome, Problems


def run(*words: object) -> Result:
    return CliRunner().invoke(
        main, ["verify", "--backend", "tiled", "--backend", "cpu", "--long", "0", *map(str, words)]
    )


@pytest.fixture(autouse=True)
def problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """All right, but that `cpu` declines multiples of five and fails at 1000003; seeds from 1000008 on interrupt."""

    def examined(problems: Problems, number: Number) -> list[Outcome]:
        seed = number.seed
        if seed >= 1_000_008:
            raise KeyboardInterrupt
        right = Outcome("tiled", seed, "float32", "", (Deviation("out", 0.5),))
        error = "wrong" if seed == 1_000_003 else None
        return [right, Outcome("cpu", seed, "float32", "", error=error, declined="no" if seed % 5 == 0 else None)]

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


def test_a_pipe_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "EVERY", 0.0)
    assert "problems: 1 of 2, 0 s\nproblems: 2 of 2, 0 s\n" in run("--cases", 2).stderr


def test_a_narrow_terminal_has_all_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    heading, *_ = run("--cases", 2).stdout.splitlines()
    assert heading.split() == ["backend", "dtype", "cases", "failed", "declined", "worst", "ratio", "of", "seed"]
