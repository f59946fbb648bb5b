"""Choices on CPUs by measured rates, against the measured times of all ways to run calls."""

import statistics
from pathlib import Path
from unittest import mock

import pytest
import torch

from flashtile.api.explain import described_call
from flashtile.backend import cpu_cost
from flashtile.backend.cpu import rates, support, targets
from flashtile.backend.tiled import support as tiled
from flashtile.calibrate import processor
from flashtile.calibrate.candidates import Subject
from flashtile.calibrate.processor import costs_of, standard, write
from flashtile.calibrate.store import read
from flashtile.call.call import Call, Needs, Settings, Tensors
from flashtile.call.device import Device
from flashtile.call.problem import Problem
from flashtile.dispatch import planner

STORE = Path(__file__).parents[3] / "benchmarks" / "results" / "candidates-emerald-rapids.jsonl"
CPU = Device("cpu", "CPU", "x86_64", 2)
QKV = Needs(True, True, True)
MEAN, FAR = 0.03, 0.35  # of the best time: mean of all calls, and the most of one


@pytest.fixture(autouse=True)
def measured_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the shipped file, with its vectors, whatever this machine has."""
    monkeypatch.setattr(rates, "processor_name", lambda: "Intel(R) Xeon(R) Processor, family 6, model 207")
    monkeypatch.setattr(targets, "requested_width", lambda: "amx")


def test_chosen_ways_are_near_the_best() -> None:
    rows, losses = [row for row in read(STORE) if not row.stale], []
    known = rates.rates_here()
    for row in rows:
        expected = {name: cost.time(known) for name, (cost, _) in zip(row.times, costs_of(row), strict=True)}
        chosen = min(expected, key=lambda name: expected[name])
        losses.append(row.times[chosen][0] / min(times[0] for times in row.times.values()) - 1)
    assert len(rows) >= 100, "measure again: flashtile calibrate --device cpu"
    assert statistics.mean(losses) < MEAN
    assert max(losses) < FAR


@pytest.mark.parametrize("width", ["amx", "avx512", "avx2"])
def test_narrow_heads_have_no_rival(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that their plans ask for no time."""
    monkeypatch.setattr(targets, "requested_width", lambda: width)
    subjects = [Subject.of(cell, torch.device("meta")) for cell in standard([])]
    for needs, p in ((x.needs, x.problem) for x in subjects if not support.has_rival(x.problem)):
        (slow,) = tiled.candidates(p, CPU, needs)
        assert support.timed_candidates(p, CPU, needs)[0].microseconds < slow.microseconds


def problem_of(rows: int, width: int, dtype: torch.dtype) -> Problem:
    q = torch.empty(1, 2, rows, width, dtype=dtype, device="meta")
    return Problem.describe(described_call(q, q, q, None, None, {})).bucketed()


def test_one_way_asks_for_no_time() -> None:
    with mock.patch.object(cpu_cost, "time", side_effect=AssertionError("asked")):
        assert planner.candidates_of("cpu", problem_of(100, 64, torch.float32), CPU, None)[0].microseconds == 0
        with pytest.raises(AssertionError, match="asked"):
            planner.candidates_of("cpu", problem_of(100, 512, torch.float64), CPU, None)


def test_a_few_rows_have_two_ways() -> None:
    found = support.candidates(problem_of(4, 64, torch.bfloat16), CPU, None)
    assert {x.tile.decodes for x in found} == {True, False}
    assert [x.microseconds for x in found] == sorted(x.microseconds for x in found)
    assert len(support.candidates(problem_of(4, 64, torch.bfloat16), CPU, QKV)) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads", [1, 16])
def test_wide_caches_have_no_rival(heads: int, dtype: torch.dtype) -> None:
    """`tiled` copies their keys: 10 to 30 times as slow with latent rows, whatever is expected of it."""
    q, k = (torch.empty(8, n, m, 576, dtype=dtype) for n, m in ((heads, 1), (1, 2048)))
    pages, table = k.transpose(1, 2), torch.arange(8, dtype=torch.int32)[:, None]
    lengths = torch.full((8,), 2048, dtype=torch.int32)
    tensors = Tensors(q, pages, pages[..., :512], seqused_k=lengths, page_table=table)
    problem = Problem.describe(Call(tensors, Settings(scale=0.1, max_seqlen_k=2048, v_dim=512)))
    assert planner.plan(problem, torch.device("cpu"), "auto").backend == "cpu"
    assert support.candidates(problem, CPU, None)[0].microseconds == 0


def test_other_processors_are_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    here = rates.rates_here()
    assert "scaled" not in here.about
    monkeypatch.setattr(targets, "requested_width", lambda: "avx2")
    slow = rates.rates_here()
    assert "scaled: 0.5 of its vectors" in slow.about
    assert slow["rows float32 product"] == 2 * here["rows float32 product"]
    assert slow["rows bfloat16 product"] == slow["rows float16 product"]
    assert slow["launch"] == here["launch"]
    assert slow["never measured"] == 0


def test_rates_are_written_and_read_again(tmp_path: Path) -> None:
    found = write(tmp_path / "cpu.toml", list(read(STORE)), "a command")
    text = (tmp_path / "cpu.toml").read_text()
    assert found.rates["launch"] > 0
    assert all(f'"{name}" = ' in text for name in found.rates)
    assert "`a command`" in text


def test_a_run_goes_on_where_another_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, cells = tmp_path / "store.jsonl", standard([])[:2]
    rows = {row.cell: row for row in read(STORE)}
    monkeypatch.setattr(processor, "measure", lambda cell: rows[cell])
    assert processor.measure_all(cells[:1], store, 60) == 0
    monkeypatch.setattr(processor, "measure", lambda cell: rows[cell] if cell == cells[1] else None)
    assert processor.measure_all(cells, store, 60) == 0
    assert [row.cell for row in read(store)] == cells
    assert processor.measure_all(standard([])[:3], store, 0) == 1
