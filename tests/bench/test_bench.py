"""`flashtile bench`: what it counts, that it finds wrong results, that it is fair, and that nothing stops it."""

import csv
import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Result, invoke
from spoilt import CPU, SMALL, Spoilt
from torch import Tensor

from flashtile.bench.cell import Cell
from flashtile.bench.clocks import clock_of
from flashtile.bench.fresh import Job, in_fresh_process, in_one_process, samples
from flashtile.bench.providers import Prepared, Provider, all_names, make
from flashtile.bench.providers import provider as provider_module
from flashtile.bench.results import Results, Row
from flashtile.bench.rounds import Band, Entrant, band, interleave, ratios
from flashtile.bench.run import Bench
from flashtile.bench.sweep import Sweep, Timing, expand, load
from flashtile.bench.tables import reasons, tables
from flashtile.testing.case import Case

ROOT = Path(__file__).parents[2]
QUICK = Timing(rounds=2, sample_seconds=1e-4, rest_seconds=0.0, fresh_runs=1)


def run(*words: str) -> Result:
    return invoke(["bench", *words])


# Cells and sweeps ----------------------------------------------------------------------------------------------------


def test_flops_are_those_of_visible_pairs() -> None:
    cell = Cell(batch=2, heads=3, seqlen_q=5, head_dim=8)
    assert cell.flops == 4 * 2 * 3 * 5 * 5 * 8
    assert replace(cell, measure="backward").flops == cell.flops * 5 // 2
    assert replace(cell, head_dim_v=4).flops == 2 * 2 * 3 * 5 * 5 * (8 + 4)
    assert replace(cell, causal=True).flops == 4 * 2 * 3 * 15 * 8
    assert replace(cell, causal=True, window=(1, -1)).flops == 4 * 2 * 3 * (1 + 4 * 2) * 8
    assert replace(cell, window=(1, 1)).flops == 4 * 2 * 3 * (2 + 3 * 3 + 2) * 8
    assert replace(cell, seqlen_k=7, causal=True).flops == 4 * 2 * 3 * (3 + 4 + 5 + 6 + 7) * 8
    packed = Cell(heads=3, head_dim=8, lengths=(2, 4), seqlen_q=4, causal=True)
    assert packed.flops == 4 * 3 * (3 + 10) * 8
    assert Cell(batch=2, heads_kv=2, seqlen_q=1, seqlen_k=9, head_dim=8, dtype="float16").kv_bytes == 2 * 2 * 9 * 16 * 2


def test_tables_of_a_sweep_expand_to_combinations() -> None:
    cells = expand({"measure": ["forward", "backward"], "seqlen_q": [256, 512], "tokens": 1024, "window": [3, 0]})
    assert [(c.measure, c.seqlen_q, c.batch, c.window) for c in cells] == [
        (measure, seqlen, 1024 // seqlen, (3, 0)) for measure in ("forward", "backward") for seqlen in (256, 512)
    ]
    assert [c.window for c in expand({"window": [[3, 0], [-1, 2]]})] == [(3, 0), (-1, 2)]
    (packed,) = expand({"lengths": [3, 9]})
    assert (packed.batch, packed.seqlen_q, packed.sequences) == (2, 9, [(3, 3), (9, 9)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cells = [{seqlen = 3}]", "no field seqlen"),
        ("cells = [{heads = 6, heads_kv = 4}]", "not a multiple"),
        ("cells = [{measure = 'speed'}]", "'speed'"),
        ("cells = [{}]\nrepeats = 3", "no entry repeats"),
        ("cells = [", "Invalid"),
        ("providers = ['plain']\nreference = 'flex'\n[[cells]]", "the reference 'flex' is none of the providers"),
        ("[timing]\ntimes = 3\n[[cells]]", "times"),
    ],
)
def test_mistakes_in_a_sweep_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    result = run("--sweep", str(path))
    assert result.exit_code == 1
    assert message in result.stderr
    assert str(path) in result.stderr


def test_filters() -> None:
    sweep = Sweep("", tuple(expand({"seqlen_q": [1, 2, 3], "causal": [False, True]})))
    assert len(sweep.only(("seqlen_q=1|3 causal=true", "seqlen_q=2")).cells) == 4
    for wrong in ("seqlen_q=9", "length=1", "causal"):
        with pytest.raises(ValueError, match=wrong.split("=")[0]):
            sweep.only((wrong,))


OTHERS = "masks.toml", "distributed.toml", "derivatives.toml"  # of programs of their own
SWEEPS = [path for path in sorted((ROOT / "benchmarks").glob("*.toml")) if path.name not in OTHERS]


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_the_sweeps_of_the_project(path: Path) -> None:
    sweep = load(path)
    assert sweep.cells
    assert make(sweep.providers)
    assert sweep.reference in sweep.providers
    assert path.name in path.read_text()  # the command that runs it


def test_cells_travel_as_json() -> None:
    cell = Cell(window=(3, 0), lengths=(3, 4), seqlen_q=4)
    job = Job((cell, SMALL), "plain", "cpu")
    assert Job.from_json(job.as_json()) == job


# Rounds --------------------------------------------------------------------------------------------------------------


class Ticks:
    """A clock by which every run takes what the list says."""

    kind, graphs, cache_bytes = "ticks", False, 0

    def __init__(self) -> None:
        self.order: list[str] = []
        self.rests: list[float] = []

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)

    def seconds(self, run: Callable[[], Any], calls: int) -> float:
        self.order.append(run())
        return 0.5

    def eager_seconds(self, run: Callable[[], Any], calls: int) -> float:
        raise AssertionError("no entrant is eager")

    def host_seconds(self, run: Callable[[], Any], calls: int) -> None:
        return None

    def replayable(self, runs: Any) -> Any:
        return runs[0]

    def state(self) -> dict[str, Any]:
        return {}


def test_rounds_interleave_and_rotate_with_equal_rests() -> None:
    clock = Ticks()
    entrants = [Entrant(name, lambda name=name: name) for name in "abc"]
    interleave(clock, entrants, Timing(rounds=4, rest_seconds=0.25), str)
    assert "".join(clock.order[-12:]) == "abcbcacababc"
    assert clock.rests == [0.25] * 15
    assert [len(entrant.seconds) for entrant in entrants] == [4, 4, 4]


def test_a_slow_cell_has_fewer_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    entrant = Entrant("a", lambda: "a")
    monkeypatch.setattr("flashtile.bench.rounds.time.perf_counter", iter(range(99)).__next__)
    interleave(Ticks(), [entrant], Timing(rounds=9, rest_seconds=0, most_seconds=0.5), str)
    assert len(entrant.seconds) == 3


def test_an_entrant_that_fails_is_dropped_and_the_others_go_on() -> None:
    turns = iter(range(99))

    def fails() -> str:
        if next(turns) > 3:
            raise RuntimeError("out of luck")
        return "b"

    entrants = [Entrant("a", lambda: "a"), Entrant("b", fails)]
    interleave(Ticks(), entrants, Timing(rounds=5, rest_seconds=0), str)
    assert entrants[1].failure == "out of luck"
    assert len(entrants[0].seconds) == 5


def test_bands_and_ratios() -> None:
    assert band([5.0, 1.0, 2.0, 3.0, 4.0, 6.0]) == pytest.approx((3.5, 2.0, 5.0))
    assert Band(2.0, 1.0, 4.0).map(lambda x: 8 / x) == (4.0, 2.0, 8.0)
    assert ratios([2.0, 4.0], [4.0, 4.0]) == [2.0, 1.0]


def test_the_cpu_clock_counts_every_call() -> None:
    calls: list[int] = []
    clock = clock_of(CPU)
    assert clock.seconds(lambda: calls.append(1), 5) > 0
    assert len(calls) == 5
    assert clock.cache_bytes >= 2**18


def test_a_rest_on_a_cpu_lasts_until_threads_stop_spinning() -> None:
    """As those of thread pools do after a call."""
    end = time.perf_counter() + 0.1

    def spin() -> None:
        while time.perf_counter() < end:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    clock_of(CPU).rest(0.005)
    assert time.perf_counter() > end - 0.01
    thread.join()


# Runs ----------------------------------------------------------------------------------------------------------------


def results_of(cell: Cell, *providers: Provider, reference: str | None = None) -> dict[str, Row]:
    work = Bench(CPU, list(providers), QUICK, reference, None)
    return {row.provider: row for row in work.run(Sweep("", (cell,)), lambda cell: None)}


@pytest.mark.parametrize("measure", ["forward", "backward", "decode"])
def test_every_measure_has_figures(measure: str) -> None:
    cell = replace(SMALL, measure=measure)
    if measure == "decode":
        cell = replace(cell, seqlen_q=1, seqlen_k=40)
    rows = results_of(cell, *make(["flashtile", "sdpa:flash", "plain"]), reference="plain")
    for row in rows.values():
        assert row.status == "ok", row
        assert len(row.samples) == len(row.ratios) == QUICK.rounds
        assert row.error_ratio is not None
        assert row.error_ratio <= 1
        rate = row.bytes_per_second if measure == "decode" else row.flops_per_second
        assert rate is not None
        amount = cell.kv_bytes if measure == "decode" else cell.flops
        assert rate.median == pytest.approx(amount / band(row.samples).median)
        assert rate.low <= rate.median <= rate.high
    assert rows["plain"].ratios == [1.0, 1.0]


def test_a_wrong_result_has_no_speed() -> None:
    row = results_of(SMALL, Spoilt(lambda name, x: x * 1.1))["spoilt"]
    assert row.status == "wrong"
    assert row.reason.startswith("out[")
    assert row.value is None
    assert not row.samples
    assert row.as_record()["flops_per_second"] is None


class Broken(Provider):
    name = "broken"

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        raise RuntimeError("no kernel\nwith many lines")


def test_failures_are_rows_and_stop_nothing() -> None:
    rows = results_of(SMALL, Broken(), *make(["flashtile:none", "fa3", "sdpa:cudnn", "flashtile"]))
    assert (rows["broken"].status, rows["broken"].reason) == ("failed", "RuntimeError: no kernel")
    assert "there is no backend 'none'" in rows["flashtile:none"].reason
    assert {rows[name].status for name in ("flashtile:none", "fa3", "sdpa:cudnn")} == {"declined"}
    assert rows["flashtile"].status == "ok"


def test_a_dense_method_is_not_begun_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider_module, "free_bytes", lambda device: 10_000)
    row = results_of(SMALL, *make(["plain"]))["plain"]
    assert row.status == "declined"
    assert "free memory" in row.reason


def test_unknown_providers_are_refused() -> None:
    result = run("--providers", "flashtile,sdpa:none")
    assert result.exit_code == 1
    assert all(name in result.stderr for name in all_names())


# Fresh processes -----------------------------------------------------------------------------------------------------


def test_memory_of_a_fresh_process(tmp_path: Path) -> None:
    scores = 2 * 1024 * 1024 * 4
    cells = tuple(Cell(measure="forward_memory", heads=2, seqlen_q=n, head_dim=16) for n in (512, 1024))
    bounds = {"sdpa:flash": (1, scores), "plain": (scores, 4 * scores)}
    findings = in_one_process([Job(cells, name, "cpu") for name in bounds], str(tmp_path))
    for (short, long), (least, most) in zip(findings, bounds.values(), strict=True):
        assert least <= long["value"] <= most, long
        assert short["value"] < long["value"]
        if long["resident_bytes"] is not None:
            # Pages that the process has already may be enough for little memory.
            assert least // 2 <= long["resident_bytes"] <= most + 64 * 2**20


def test_first_calls_and_failures_of_fresh_processes(tmp_path: Path) -> None:
    cell = replace(SMALL, measure="first_call_cold")
    (finding,) = samples(Job((cell,), "flashtile", "cpu"), 1)
    assert 1e-4 < finding["value"] < 60
    ((declined,),) = in_one_process([Job((cell,), "fa4", "cpu")], str(tmp_path))
    assert "declined" in declined
    (finding,) = in_fresh_process(Job((cell,), "nobody", "cpu"), str(tmp_path))
    assert "there is no provider" in finding["error"]


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_writes_tidy_files(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.toml"
    sweep.write_text("name = 'x'\n[[cells]]\nseqlen_q = [16, 32]\nheads = 2\nwindow = [3, 0]\n")
    words = ["--sweep", str(sweep), "--providers", "flashtile,plain,fa4", "--rounds", "3", "--reference", "plain"]
    result = run(*words, "--sample-seconds", "0.0001", "--out", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {"commit", "command", "torch", "device", "machine", "versions"} <= found["about"].keys()
    with (tmp_path / "out/results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["seqlen_q"], row["provider"]) for row in rows] == [
        (n, name) for n in ("16", "32") for name in ("flashtile", "plain", "fa4")
    ]
    assert {row["window"] for row in rows} == {"3 0"}
    assert all(math.isfinite(float(row["flops_per_second_p20"])) for row in rows if row["status"] == "ok")
    with (tmp_path / "out/samples.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 2 * 3
    assert json.loads((tmp_path / "out/results.json").read_text())["rows"] == found["rows"]


def test_an_interruption_loses_no_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows(self: Bench, cell: Cell) -> list[Row]:
        if cell.seqlen_q != 512:
            raise KeyboardInterrupt
        return [Row(cell, "flashtile", samples=[1.0])]

    monkeypatch.setattr(Bench, "rows", rows)
    result = run(
        "--providers", "flashtile", "--out", str(tmp_path), "--cells", "measure=forward causal=false", "--json"
    )
    assert result.exit_code != 0
    for text in (result.stdout, (tmp_path / "results.json").read_text()):
        (row,) = json.JSONDecoder().raw_decode(text)[0]["rows"]
        assert (row["seqlen_q"], row["status"], row["value"]) == (512, "ok", 1.0)


def test_tables_show_figures_and_reasons() -> None:
    rows = results_of(SMALL, Spoilt(lambda name, x: x * 1.1), *make(["plain", "fa2"]), reference="plain")
    results = Results("", "plain", {}, list(rows.values()))
    (grid,) = tables(results)
    assert len(grid.rows) == 3  # the cell, and two that ran
    assert [(status, name) for status, name, _, _ in reasons(results)] == [("wrong", "spoilt"), ("declined", "fa2")]


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_measures_on_a_gpu() -> None:
    device = torch.device("cuda")
    cell = Cell(batch=2, heads=8, seqlen_q=512, dtype="bfloat16", causal=True)
    cells = (cell, replace(cell, measure="backward"), replace(cell, measure="decode", seqlen_q=1, seqlen_k=512))
    work = Bench(device, make(["flashtile", "sdpa:flash"]), QUICK, "sdpa:flash", None)
    rows = list(work.run(Sweep("", cells), lambda cell: None))
    assert [row.reason for row in rows] == [""] * 6
    assert all(row.host_seconds for row in rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_gpu_clock_counts_no_host_time() -> None:
    """A small kernel asked for by a slow host: the device's time is far below the host's."""
    x = torch.ones(1024, device="cuda")

    def slow_host() -> Tensor:
        torch.cuda._sleep(1000)
        for _ in range(200):
            sum(range(20))
        return x.add(1)

    clock = clock_of(torch.device("cuda"))
    slow_host()
    host = clock.host_seconds(slow_host, 20)
    assert host is not None
    assert clock.seconds(slow_host, 20) < host / 2
