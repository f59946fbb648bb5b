"""The sweep of real models: its cells, short cells in CUDA graphs, and runs that go on where an earlier one ended."""

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import invoke

from flashtile import processes
from flashtile.bench import run as run_module
from flashtile.bench.cell import Cell
from flashtile.bench.check import Checker
from flashtile.bench.clocks.cuda import CudaClock
from flashtile.bench.inputs import make_case
from flashtile.bench.providers import Declined, make
from flashtile.bench.results import Row
from flashtile.bench.run import Bench
from flashtile.bench.store import Store
from flashtile.bench.supervise import LOST, Unable, Work, measure
from flashtile.bench.sweep import Timing, load
from flashtile.report.models import compared, lines_of, section_of

SWEEP = Path(__file__).parents[2] / "benchmarks" / "models.toml"
CPU = torch.device("cpu")
SMALL = Cell("backward", batch=5, heads=4, heads_kv=2, seqlen_q=36, head_dim=16)
QUICK = Timing(rounds=2, sample_seconds=1e-4, rest_seconds=0.0)

# The cells -----------------------------------------------------------------------------------------------------------


def test_the_sweep_covers_the_kinds_of_calls() -> None:
    sweep = load(SWEEP)
    cells = sweep.on("cuda").cells
    assert len({cell.model for cell in cells}) >= 50
    assert all(cell.model and cell.source for cell in sweep.cells)
    assert len({(cell.model, cell.measure) for cell in sweep.cells}) == len(sweep.cells)
    assert {min(c.head_dim for c in cells), max(c.head_dim for c in cells)} == {16, 512}
    assert min(cell.seqlen_q for cell in cells if cell.measure == "forward") <= 16
    assert max(cell.keys for cell in cells) == 131072
    assert {1, 4096} <= {cell.batch for cell in cells}
    assert {cell.dtype for cell in cells} == {"float16", "bfloat16", "float32"}
    assert {cell.belongs_to for cell in cells} == {"", "scores", "masks"}
    assert any(cell.lengths for cell in cells)
    for device in ("cuda", "cpu"):
        chosen = sweep.on(device)
        assert [cell.model in sweep.quick for cell in chosen.cells] == [n < 12 for n in range(len(chosen.cells))]
    assert {cell.model for cell in sweep.only(("model=t5|bloom",)).cells} >= {"T5 large, encoder", "BLOOM 7B"}


@pytest.mark.parametrize(
    "fields", [{"mask": "prefix"}, {"mask": "stripes 4"}, {"mask": "blocks 0"}, {"score_mod": "t6"}]
)
def test_patterns_that_do_not_exist_are_named(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Cell(**fields)


@pytest.mark.parametrize(
    ("fields", "seqlen"),
    [
        ({"score_mod": "t5"}, 36),
        ({"score_mod": "relative"}, 36),
        ({"mask": "prefix 20"}, 36),
        ({"mask": "shifted 6", "bias": True}, 36),
        ({"score_mod": "t5"}, 612),  # checked in parts
        ({"mask": "shifted 6", "bias": True}, 612),
    ],
    ids=str,
)
def test_scores_and_masks_mean_the_same_to_each_library(fields: dict[str, Any], seqlen: int) -> None:
    case = make_case(replace(SMALL, seqlen_q=seqlen, **fields), CPU)
    checker = Checker(case)
    for provider in make(["flashtile", "sdpa:math", "plain"]):
        found = checker.verdict(provider, provider.prepare(case), False)
        assert found.ok, found


def test_masks_are_those_of_their_names() -> None:
    def mask(text: str, seqlen: int = 6) -> list[str]:
        shown = make_case(replace(SMALL, seqlen_q=seqlen, mask=text), CPU).arguments["mask"]
        return ["".join(map(str, row)) for row in shown[0, 0].int().tolist()]

    assert mask("prefix 3") == ["111000", "111000", "111000", "111100", "111110", "111111"]
    assert mask("frames 3") == ["111000"] * 3 + ["111111"] * 3
    assert mask("blocks 4") == ["111100"] * 4 + ["000011"] * 2
    assert mask("shifted 2", 4) == ["1100", "1100", "0011", "0011"]


# ONNX Runtime --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"causal": True}, {"seqlen_k": 50}, {"bias": True}, {"head_dim_v": 24}], ids=str
)
def test_onnx_runtime_is_called_as_the_contract_means_it(fields: dict[str, Any]) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    (provider,) = make(["onnx"])
    case = make_case(replace(SMALL, measure="forward", heads_kv=None, **fields), CPU)
    found = Checker(case).verdict(provider, provider.prepare(case), False)
    assert found.ok, found


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"measure": "backward"}, "backward"), ({"dtype": "bfloat16"}, "float32"), ({"heads_kv": 2}, "grouped heads")],
)
def test_onnx_runtime_declines(fields: dict[str, Any], reason: str) -> None:
    plain: dict[str, Any] = {"measure": "forward", "heads_kv": None}
    with pytest.raises(Declined, match=reason):
        make(["onnx"])[0].prepare(make_case(replace(SMALL, **plain | fields), CPU))


# Short cells ---------------------------------------------------------------------------------------------------------


class GraphClock:
    """A clock whose calls take 10 µs, 40 µs eagerly; `capture_fails` names calls that cannot be captured."""

    kind, graphs, cache_bytes = "ticks", True, 0

    def __init__(self, call_seconds: float, failing: int | None = None) -> None:
        self.call_seconds, self.failing, self.captures = call_seconds, failing, 0

    def rest(self, seconds: float) -> None: ...

    def seconds(self, run: Callable[[], Any], calls: int) -> float:
        run()
        return self.call_seconds * (20 if getattr(run, "graph", False) else 1)

    def eager_seconds(self, run: Callable[[], Any], calls: int) -> float:
        assert not getattr(run, "graph", False)
        return 4 * self.call_seconds

    def host_seconds(self, run: Callable[[], Any], calls: int) -> float:
        return 3e-5

    def replayable(self, runs: Any) -> Any:
        self.captures += 1
        if self.captures == self.failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        assert len(runs) == 20

        def replay() -> None:
            runs[0]()

        replay.graph = True  # type: ignore[attr-defined]
        return replay

    def state(self) -> dict[str, Any]:
        return {}


def rows_with(clock: GraphClock, cell: Cell) -> list[Row]:
    work = Bench(CPU, make(["flashtile", "plain"]), replace(QUICK, short_seconds=1e-4), None, None)
    work.clock = clock
    return work.rows(cell)


@pytest.mark.parametrize("measure", ["forward", "backward"])
def test_short_cells_are_timed_in_a_graph_and_eagerly(measure: str) -> None:
    own, other = rows_with(GraphClock(1e-5), replace(SMALL, measure=measure))
    for row in (own, other):
        assert row.samples == pytest.approx([1e-5] * 2)
        assert row.eager == pytest.approx([4e-5] * 2)
        assert row.timing == "ticks, CUDA graph of 20 calls"
    comparisons = compared({own.cell: [own, other]})
    assert [x.group for x in comparisons] == ["models", "models, eager"]


def test_longer_cells_are_timed_once() -> None:
    for row in rows_with(GraphClock(2e-4), SMALL):
        assert row.samples == pytest.approx([2e-4] * 2)
        assert (row.eager, row.timing) == ([], "ticks")


def test_a_call_that_cannot_be_captured_says_so() -> None:
    own, other = rows_with(GraphClock(1e-5, failing=1), SMALL)
    assert "no CUDA graph: RuntimeError: operation not permitted" in own.timing
    assert own.samples == pytest.approx(other.samples)
    assert own.eager


def test_graphs_are_captured_on_the_stream_of_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd runs backward where forward ran, which must be the stream that is captured."""
    streams: list[Any] = ["default"]
    seen: list[Any] = []

    @contextmanager
    def on(stream: Any) -> Any:
        streams.append(stream)
        yield
        streams.pop()

    side = SimpleNamespace(wait_stream=lambda other: None)
    current = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "device": lambda device: on(streams[-1]),
        "Stream": lambda: side,
        "current_stream": lambda: current,
        "stream": on,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: seen.append("replay")),
        "graph": lambda graph, stream: on(stream),
    }.items():
        monkeypatch.setattr(f"torch.cuda.{name}", value)
    replay = CudaClock(torch.device("cuda", 0)).replayable([lambda: seen.append(streams[-1])] * 2)
    replay()
    assert seen == [side] * 4 + ["replay"]


def test_specialists_are_asked_for_cells_of_their_kind_only() -> None:
    work = Bench(CPU, make(["flashtile", "plain"]), QUICK, None, None, specialists=("plain",))
    assert [work.rows(cell)[1].status for cell in (SMALL, replace(SMALL, bias=True))] == ["declined", "ok"]


def test_a_provider_that_is_far_behind_has_one_round() -> None:
    class Slow(GraphClock):
        graphs = False

        def seconds(self, run: Callable[[], Any], calls: int) -> float:
            return 0.5 if run() == "slow" else 0.01

    entrants = [run_module.Entrant(name, lambda name=name: name) for name in ("slow", "fast")]
    run_module.interleave(Slow(1.0), entrants, replace(QUICK, rounds=4), str)
    assert [len(entrant.seconds) for entrant in entrants] == [1, 4]


def test_the_preparation_of_a_cell_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(0, 999, 60))
    monkeypatch.setattr(run_module, "time", SimpleNamespace(perf_counter=lambda: float(next(seconds))))
    work = Bench(CPU, make(["flashtile", "plain", "sdpa:math"]), replace(QUICK, cell_seconds=130.0), None, None)
    rows = work.rows(SMALL)
    assert [row.status for row in rows] == ["ok", "ok", "failed"]
    assert "130 s of this cell" in rows[2].reason


# The store -----------------------------------------------------------------------------------------------------------


def test_a_store_gives_rows_as_they_were(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.jsonl")
    cell = replace(SMALL, window=(3, 0), lengths=(3, 4), mask="blocks 4", model="m")
    rows = [Row(cell, "flashtile", samples=[1.0, 2.0], eager=[3.0]), Row(cell, "flex", "failed", "out of memory")]
    store.append(rows, {"commit": "a", "date": "d", "device": "x"})
    assert store.read() == {cell: rows}
    assert store.about() == {"commit": "a", "date": "d", "device": "x"}
    with store.path.open("a") as file:
        file.write('{"cell": {"model": "cut')
    assert store.read() == {cell: rows}
    store.append([replace(row, cell=SMALL) for row in rows], {"commit": "b", "date": "e", "device": "y"})
    assert store.about() == {"commit": "a to b", "date": "d to e", "device": "x and y"}
    assert [*store.devices().values()] == ["x", "y"]
    assert list(store.read()) == [cell, SMALL]
    assert store.missing([cell, SMALL], ["flashtile"]) == []
    assert store.missing([cell], ["flashtile", "fa3"]) == [cell]
    store.forget([cell])
    assert store.missing([cell, SMALL], ["flashtile"]) == [cell]


class Child:
    """Processes that measure, one after another: each does one of `endings`, a status, or "hangs", "timeout"."""

    def __init__(self, store: Store, *endings: Any) -> None:
        self.store, self.endings, self.absent = store, list(endings), []

    def __call__(self, code: str, path: str, timeout: float | None) -> CompletedProcess[str]:
        work = Work.from_json(Path(path).read_text())
        self.absent.append(work.absent)
        ending, step = self.endings.pop(0)
        for index, cell in enumerate(work.cells):
            if cell not in self.store.read():
                if step is not None:
                    Path(work.step_file).write_text(f"{index} {step}")
                break
        if ending == "timeout":
            raise TimeoutExpired(code, timeout or 0.0)
        if ending == LOST:
            Path(work.step_file).with_suffix(".reason").write_text("context lost")
        if ending == 0:
            for cell in self.store.missing(work.cells, work.providers):
                self.store.append([Row(cell, name) for name in work.providers], {})
        return CompletedProcess(
            "", 1 if ending == "hangs" else ending, "", "Timeout (0:02:00)!" if ending == "hangs" else ""
        )


def supervised(monkeypatch: pytest.MonkeyPatch, path: Path, *endings: Any) -> tuple[Child, list[Cell], Store]:
    store = Store(path)
    child = Child(store, *endings)
    monkeypatch.setattr(processes, "run_python", child)
    cells = (SMALL, replace(SMALL, seqlen_q=40))
    work = Work(cells, ("flashtile", "plain"), "cpu", QUICK, None, None, str(path), 120.0)
    return child, measure(work, 500.0, lambda words: None), store


def test_a_provider_that_ends_the_process_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    endings = [("hangs", "plain"), (-11, "flashtile"), (LOST, "flashtile"), (0, None)]
    child, left, _ = supervised(monkeypatch, tmp_path / "s", *endings)
    assert not left
    gone = [(0, "plain", "gave up after 120 s"), (0, "flashtile", "the process ended with -11: no word")]
    gone.append((0, "flashtile", "context lost"))
    assert child.absent == [gone[:n] for n in range(4)]


def test_rounds_that_end_the_process_are_a_failed_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, left, store = supervised(monkeypatch, tmp_path / "s", (-11, "rounds"), (0, None))
    assert not left
    assert {row.status for row in store.read()[SMALL]} == {"failed"}
    assert {row.status for row in store.read()[replace(SMALL, seqlen_q=40)]} == {"ok"}


def test_the_time_of_a_run_ends_it_and_a_broken_machine_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _, left, store = supervised(monkeypatch, tmp_path / "s", ("timeout", "flashtile"))
    assert len(left) == 2
    assert not store.read()
    for endings in ([(1, None)], [(1, "preparation"), (1, "preparation")]):
        with pytest.raises(Unable):
            supervised(monkeypatch, tmp_path / "t", *endings)


def test_a_sweep_goes_on_behind_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole command: ONNX Runtime is a module that ends the process, and the second process leaves it out."""
    (tmp_path / "onnxruntime.py").write_text("__version__ = '0'")
    (tmp_path / "onnx.py").write_text("import os\nos._exit(7)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    (tmp_path / "sweep.toml").write_text(
        "name = 'x'\nproviders = ['flashtile', 'onnx', 'plain']\nreference = 'plain'\n"
        "[timing]\nrounds = 2\nsample_seconds = 1e-4\n"
        "[[cells]]\nmodel = 'tiny'\nseqlen_q = 16\nheads = 2\ndevice = 'cpu'\n"
        "[[cells]]\ndevice = 'cuda'\n"
    )
    words = ["bench", "--sweep", str(tmp_path / "sweep.toml"), "--store", str(tmp_path / "s.jsonl"), "--seconds", "300"]
    result = invoke([*words, "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "1 of 1 cells are in" in result.output
    (rows,) = Store(tmp_path / "s.jsonl").read().values()
    assert [(row.provider, row.status) for row in rows] == [("flashtile", "ok"), ("onnx", "failed"), ("plain", "ok")]
    assert rows[1].reason == "the process ended with 7: no word"
    assert len(json.loads((tmp_path / "out/results.json").read_text())["rows"]) == 3
    monkeypatch.setattr(processes, "run_python", None)  # nothing is left to measure
    assert invoke(words).exit_code == 0


# The report ----------------------------------------------------------------------------------------------------------


def test_losses_come_first_and_absences_are_counted() -> None:
    def rows(cell: Cell, own: float | None, *others: float) -> list[Row]:
        found = [Row(cell, "flashtile", samples=[own] * 3) if own else Row(cell, "flashtile", "wrong", "out is off")]
        found += [Row(cell, name, samples=[x] * 3) for name, x in zip(("sdpa:math", "flex"), others, strict=False)]
        return [*found, Row(cell, "fa3", "declined", "not installed")]

    cells = [replace(SMALL, model=name, mask=name == "c") for name in "abcd"]
    figures = {cells[0]: (1.0, 2.0, 4.0), cells[1]: (2.0, 1.0), cells[2]: (1.0, 3.0), cells[3]: (None, 1.0)}
    stored = {cell: rows(cell, *x) for cell, x in figures.items()}
    comparisons = {x.case[0]: x for x in compared(stored)}
    assert {name: x.ratio for name, x in comparisons.items()} == {"a": 2.0, "b": 0.5, "c": 3.0, "d": 0.0}
    assert comparisons["c"].group == "models with masks of their own"
    assert [line[:6].strip() for line in lines_of(stored)][:4] == ["0.00", "0.50", "2.00", "3.00"]
    section = section_of({}, stored, {"device": "x", "date": "y", "commit": "z"})
    assert "geometric mean 1.00" in section.summary  # of a and b
    assert [row[0][0] for row in section.tables[0].rows] == ["d", "b", "a", "c"]
    assert any("FlashAttention-3 declined in 4 of the cells" in note for note in section.notes)
