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


def cells(count: int) -> list[Cell]:
    return [Cell.from_dict({"seqlen_q": 64 + n, "device": "cuda"}) for n in range(count)]


def test_a_few_cells_are_compiled_and_then_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ends early has measured what it compiled, and no kernel is compiled while calls are measured."""
    log: list[str] = []
    end = time.time() + 60

    def ready(cell: Cell, device: torch.device) -> None:
        log.append("ready")

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
    rounds = [5, 3, 1]
    assert log == [word for n in rounds for word in ("ready",) * n + ("measured",) * n]
    assert {row.cell for row in read(store)} == {*cells(9)}


def test_a_process_that_died_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HUNG", 0.01)
    turns = threading.Barrier(2)
    run.wait(turns)  # the other one never comes
    run.wait(turns)
