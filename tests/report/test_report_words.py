"""What the report says about its figures: words, pictures and tables follow from one rule."""

import itertools
import re
from dataclasses import replace

import pytest
import torch

from flashtile.bench import captured
from flashtile.bench.byte_gpt import flashtile_attention, new_model
from flashtile.bench.cell import INPUTS, Cell
from flashtile.bench.results import Row
from flashtile.report import errors, memory, speed, training
from flashtile.report.cells import Kind, in_words, kinds
from flashtile.report.memory import slope
from flashtile.report.overview import overview
from flashtile.report.section import Section
from flashtile.report.settings import settings_for
from flashtile.report.verdict import ADJECTIVES, MARGIN


@pytest.mark.parametrize(("values", "exponent"), [({n: 3.0 * n**2 for n in (8, 16, 32, 64)}, 2), ({8: 5, 16: 10}, 1)])
def test_slope(values: dict[int, float], exponent: float) -> None:
    assert slope(values) == pytest.approx(exponent)


def test_slope_is_that_of_long_sequences_and_of_at_least_two() -> None:
    assert slope({n: max(n, 100.0) for n in (16, 32, 64, 128, 256, 512)}) == pytest.approx(1, abs=0.05)
    assert slope({8: 5.0}) is None


def made_up(*ratios: float) -> list[Section]:
    """Sections on speed, memory and error in which flashtile is `ratios` times as good as the best other."""
    settings = settings_for(torch.device("cpu"), True)
    rows, records, used = [], [], {}
    for n, ratio in enumerate(ratios):
        cell = settings.speed_cell(2**n, "forward")
        samples = {"flashtile": 1 / ratio, "plain": 2.0, "sdpa": 1.0}
        noise = (1.0, 0.82, 1.3)  # of rounds, the same for everyone
        rows += [Row(cell, name, samples=[x * y for y in noise]) for name, x in samples.items()]
        for name, x in samples.items():
            used.setdefault(("forward_memory", name), {})[2**n] = 1e6 * x
    rows += [Row(settings.speed_cell(3, "forward"), "flashtile", samples=[1.0])]  # alone: nothing to compare with
    rows += [Row(settings.speed_cell(3, "forward"), name, status="wrong") for name in ("plain", "sdpa")]
    for inputs, ratio in zip(INPUTS, ratios, strict=False):
        for name, x in {"flashtile": 1 / ratio, "plain": 1.0}.items():
            known = {"dtype": "float32", "inputs": inputs, "provider": name, "epsilon": 1e-7}
            records += [known | {"result": result, "error": 1e-7 * x} for result in ("out", "dq", "dk", "dv")]
    kind = Kind("by length", (), settings.timing, ())
    settings = replace(settings, memory_seqlens=tuple(2**n for n in range(len(ratios))))
    return [
        speed.section_of(settings, [(kind, rows)]),
        memory.section_of(settings, used, []),
        errors.section_of(settings, records, []),
    ]


@pytest.mark.parametrize("ratios", [(0.21, 0.5, 0.9, 0.98, 1.02, 3.0), (0.98, 1.5, 2.0), (0.9699,), (1.0,)])
def test_words_pictures_and_tables_say_the_same(ratios: tuple[float, ...]) -> None:
    """Counts, extremes, colors and order follow from one rule, for each question."""
    sections = made_up(*ratios)
    screen = overview(sections)
    assert [plot.name for plot in screen.plots] == ["speed", "memory", "error"]
    (table,) = screen.tables
    lost = [x < MARGIN for x in ratios]
    for section, plot, words in zip(sections, screen.plots, ADJECTIVES.values(), strict=True):
        own = ratios if section.name != "errors" else [x for x in ratios[:3] for _ in range(2)]
        counts = [sum(x < MARGIN for x in own), 0, sum(x > 1 / MARGIN for x in own)]
        counts[1] = len(own) - counts[0] - counts[2]
        said = f"{words[0]} in {counts[0]} of {len(own)}, {words[1]} in {counts[1]}, {words[2]} in {counts[2]}"
        assert said in section.summary.lower()
        assert said in plot.caption.lower()
        assert {series.name: len(series.x) for series in plot.series} == {
            word: n for word, n in zip(words, counts, strict=True) if n
        }
        whole = section.tables[0]
        assert [row[1] for row in whole.rows] == [word for word, n in zip(words, counts, strict=True) for _ in range(n)]
        assert whole.marks == frozenset(range(counts[0]))
        assert ("Worst: " in plot.caption) == any(lost) == (plot.title.split("? ")[1] in ("No.", "In part."))
        least = min(own) if section.name == "speed" else 1 / min(own)
        extreme = re.search(r"(?:Worst|Closest): ([\d.]+) times", plot.caption)
        assert extreme is not None
        assert float(extreme[1]) == pytest.approx(least, abs=0.005)
        assert (float(extreme[1]) < MARGIN if section.name == "speed" else float(extreme[1]) > 1 / MARGIN) == any(lost)
        assert whole.rows[0][2].startswith(extreme[1])
    assert [row[1] for row in table.rows if row[1] in {words[0] for words in ADJECTIVES.values()}] == (
        [row[1] for row in table.rows] if any(lost) else []
    )
    assert table.caption.startswith(f"{len(table.rows)} losses" if any(lost) else "No comparison is a loss")


def test_the_best_other_counts_and_who_failed_does_not() -> None:
    """Neither a slower other nor one that is wrong; a GPU's host is a part of what a call takes."""
    (found, *_), _, _ = (section.comparisons for section in made_up(0.5, 2.0))
    assert (found.peer, found.own, found.other) == ("PyTorch SDPA", 2.0, 1.0)
    assert speed.seconds_of(Row(Cell(), "flashtile", samples=[1.0, 3.0], host_seconds=2.0)) == [2.0, 3.0]
    assert speed.seconds_of(Row(Cell("decode"), "flashtile", samples=[1.0], host_seconds=2.0)) == [1.0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_calls_that_one_tends_to_lose_are_timed(device: str) -> None:
    settings = settings_for(torch.device(device), True)
    cells = [cell for kind in kinds(settings) for cell in kind.cells]
    assert len({in_words(cell, settings) for cell in cells}) == len(set(cells)) == len(cells)
    for measure in ("forward", "backward"):
        shapes = {(cell.batch, cell.heads, cell.seqlen_q) for cell in cells if cell.measure == measure}
        assert {(1, 1, 4), (64, settings.heads, 16)} <= shapes
        assert max(n for *_, n in shapes) == 4 * settings.seqlens[-1]
        assert {cell.dtype for cell in cells if cell.measure == measure} == {"float32", "bfloat16", "float16"}
        assert any(not cell.causal for cell in cells if cell.measure == measure)
    assert min(cell.keys for cell in cells if cell.measure == "decode") <= 256


def test_training_does_not_depend_on_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps are done, and begin as they always do, however late it is after each."""
    steps = 11
    monkeypatch.setattr(training, "BATCH", 1)
    monkeypatch.setattr(training, "SEQLEN", 16)
    monkeypatch.setattr(captured, "trained", [])
    first = list(itertools.islice(training.losses_of(new_model(), flashtile_attention, steps), 2))
    hours = itertools.count(0, 3600)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(hours)))
    settings = replace(settings_for(torch.device("cpu"), True), steps=steps)
    losses = [r["loss"] for r in training.trained(settings, lambda: None).records]
    assert losses[:2] == first
    assert len(losses) == steps


def test_other_work_on_the_machine_is_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert not speed.busy(2.0)
    assert "load 9.0 on 4 cores" in speed.busy(9.0)[0]
