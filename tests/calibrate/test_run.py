"""Processes of a measurement, as threads, without a GPU."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashtile.bench.cell import Cell
from flashtile.calibrate import run
from flashtile.calibrate.store import Row, read

LATE = 72  # rows of a cell whose kernels are not all compiled in time


def cells(count: int) -> list[Cell]:
    return [Cell.from_dict({"seqlen_q": 64 + n, "device": "cuda"}) for n in range(count)]


def test_a_few_cells_are_compiled_and_then_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends early has measured what it compiled, and no kernel is compiled while calls are measured."""
    log: list[str] = []
    end = time.time() + 60

    def ready(cell: Cell, device: torch.device, end: float) -> bool:
        log.append("ready")
        return cell.seqlen_q != LATE

    def measure(cell: Cell, device: torch.device) -> Row:
        log.append("measured")
        return Row(cell, "H100", "3.6.0", {}, {"triton 64x64": (1.0,)}, {})

    monkeypatch.setattr("flashtile.calibrate.measure.ready", ready)
    monkeypatch.setattr("flashtile.calibrate.measure.measure", measure)
    store, lock, turns = tmp_path / "rows.jsonl", threading.Lock(), threading.Barrier(2)
    shares = [cells(7), cells(9)[7:]]
    arguments: Any = (7, store, end, lock, turns)
    threads = [threading.Thread(target=run.work, args=(share, *arguments)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rounds = [(5, 4), (3, 3), (1, 1)]
    assert log == [word for n, m in rounds for word in ("ready",) * n + ("measured",) * m]
    assert {row.cell for row in read(store)} == {x for x in cells(9) if x.seqlen_q != LATE}


def test_processes_have_equal_numbers_of_cells() -> None:
    """The most of one width too, and cells of forward mode come last."""
    given = [{"head_dim": 64, "seqlen_q": n} for n in range(1, 40)] + [{"head_dim": 8 * n} for n in range(1, 7)]
    wanted = [Cell.from_dict(x | {"measure": measure}) for measure in ("tangents", "forward") for x in given]
    shares = run.divided(wanted, 6)
    assert sorted(map(repr, wanted)) == sorted(repr(cell) for share in shares for cell in share)
    assert max(map(len, shares)) <= min(map(len, shares)) + 2
    assert all(share == sorted(share, key=lambda cell: cell.moves) for share in shares)


def test_a_process_that_died_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HUNG", 0.01)
    turns = threading.Barrier(2)
    run.wait(turns)  # the other one never comes
    run.wait(turns)
