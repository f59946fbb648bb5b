"""`flashtile ladder`: what its tables hold, on problems smaller than the command's own, and what it says is missing."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result

from flashtile import iomodel
from flashtile.cli import main
from flashtile.cli.ladder import long, stack
from flashtile.cli.ladder import tables as ladder_tables
from flashtile.cli.ladder.command import NAMES
from flashtile.cli.ladder.measure import Measurement, Table
from flashtile.iomodel import Shape
from flashtile.ladder import step03_cpp, triton_or_not


def run(*words: str) -> Result:
    return CliRunner().invoke(main, ["ladder", *words])


def run_json(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences, and no time spent on times."""
    monkeypatch.setattr(stack, "STACK_LENGTHS", (8, 16))
    monkeypatch.setattr(long, "LONG_LENGTHS", (1024,))
    monkeypatch.setattr(ladder_tables, "TILES_LENGTH", 256)
    for module in (stack, long, ladder_tables):
        monkeypatch.setattr(module, "milliseconds", lambda run, device, seconds=0.0: 1.0)


@pytest.mark.usefixtures("small")
def test_stack() -> None:
    table = run_json("--table", "stack")["tables"]["stack"]
    steps = {row["step"] for row in table["rows"]}
    expected = {
        "2 scalar autograd",
        "2 Python floats",
        "4 standard PyTorch",
        "6 FlashAttention-2",
        "11 flashtile.attention",
    }
    assert expected <= steps
    assert ("3 C++ -O2" in steps) == (step03_cpp.compiler() is not None)
    assert len(table["rows"]) == 2 * len(steps)
    assert all(row["error"] < 1e-5 for row in table["rows"])
    published = {(row["step"], row["n"]): row["published_ms"] for row in table["rows"]}
    assert published["2 scalar autograd", 8] == 0.209
    assert any("backend cpu" in note for note in table["asides"]), "step 11 says its plan"


@pytest.mark.usefixtures("small")
def test_stack_has_the_first_triton_kernel_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here step 6 stands for the kernel."""
    monkeypatch.setattr(stack, "STACK_LENGTHS", (8, 64))
    monkeypatch.setattr(stack, "triton_compiles", lambda device: True)
    monkeypatch.setattr(stack.step08_triton_lite, "attention", stack.step06_flash2.attention)
    rows = run_json("--table", "stack")["tables"]["stack"]["rows"]
    assert [row["n"] for row in rows if row["step"] == stack.LITE] == [64]


@pytest.mark.usefixtures("small")
def test_stack_finds_a_step_that_is_wrong() -> None:
    """The errors come from the runs that are timed."""
    right = stack.step06_flash2.attention
    with mock.patch.object(stack.step06_flash2, "attention", lambda q, k, v: right(q, k, 0.9 * v)):
        rows = run_json("--table", "stack")["tables"]["stack"]["rows"]
    assert min(row["error"] for row in rows if row["step"] == "6 FlashAttention-2") > 0.01


@pytest.mark.usefixtures("small")
def test_stack_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step03_cpp, "library", step03_cpp.library.__wrapped__)  # without what it has compiled
    monkeypatch.setattr(step03_cpp, "compiler", lambda: None)
    table = run_json("--table", "stack")["tables"]["stack"]
    assert not any(row["step"].startswith("3") for row in table["rows"])
    assert any("Step 3 is missing" in note and "found no compiler" in note for note in table["notes"])


@pytest.mark.usefixtures("small")
def test_long() -> None:
    """Memory is measured, and is what the model says; out is a result and counts."""
    rows = {row["step"]: row for row in run_json("--table", "long")["tables"]["long"]["rows"]}
    standard, three, fused = (rows[name] for name in ("4 standard PyTorch", "4 without lse", "6 FlashAttention-2"))
    results = iomodel.result_bytes(1024, 64, 4)
    work = iomodel.standard_forward(Shape.square(1024, 64))
    assert standard["extra_mib"] * 2**20 == pytest.approx(work.peak + results, rel=0.01)
    blocks = iomodel.blocks_peak(iomodel.FLASH2_FORWARD, Shape.square(1024, 64), 128, 128)
    assert fused["extra_mib"] * 2**20 == pytest.approx(blocks + results, rel=0.05)
    assert three["extra_mib"] * 2**20 == pytest.approx(work.peak, rel=0.01)
    assert fused["saving"] == pytest.approx(three["extra_mib"] / fused["extra_mib"])
    assert (standard["speedup"], three["speedup"]) == (None, None)
    assert three["error"] == pytest.approx(standard["error"], rel=0.5)
    assert (standard["published_mib"], fused["published_mib"], fused["published_saving"]) == (8, 0.25, 32)


def test_names() -> None:
    assert tuple(ladder_tables.TABLES) == NAMES


def test_intensity() -> None:
    tables = run_json("--table", "intensity")["tables"]
    rows = {(row["n"], row["algorithm"]): row for row in tables["intensity"]["rows"]}
    for n in (1024, 4096):
        for algorithm in ("standard", "each matrix once"):
            row = rows[n, algorithm]
            assert row["intensity"] == pytest.approx(row["published"], rel=0.005)
    assert any("ridge" in note for note in tables["intensity"]["notes"])


@pytest.mark.usefixtures("small")
def test_tiles() -> None:
    rows = run_json("--table", "tiles")["tables"]["tiles"]["rows"]
    a100 = next(row for row in rows if row["on_chip"].startswith("A100"))
    assert a100["tile"] == "64 x 192"
    assert a100["flash1_mb_read"] == iomodel.flash1_forward(Shape.square(256, 64), 192 * 1024).read / 1e6


@pytest.mark.skipif(not triton_or_not.INSTALLED, reason="Triton is not installed")
def test_lite_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, since this one has no interpreter."""
    monkeypatch.setattr(ladder_tables, "LITE_PUBLISHED", {64: 0.002, 128: 0.761, 256: 1.292})
    rows = run_json("--table", "lite")["tables"]["lite"]["rows"]
    assert [(row["n"], row["tiles"]) for row in rows] == [(64, 1), (128, 2), (256, 4)]
    assert all(row["online"] < 1e-5 for row in rows)
    assert rows[0]["lite"] < 1e-5
    errors = [row["lite"] for row in rows[1:]]
    assert errors[0] > 0.1
    assert errors == sorted(errors)


@pytest.mark.skipif(not triton_or_not.INSTALLED, reason="Triton is not installed")
def test_lite_where_the_interpreter_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    table = run_json("--table", "lite")["tables"]["lite"]
    assert not table["rows"]
    assert "failed in Triton's interpreter" in table["notes"][0]


def test_lite_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_or_not, "INSTALLED", False)
    table = run_json("--table", "lite")["tables"]["lite"]
    assert not table["rows"]
    assert "Triton is not installed" in table["notes"][0]


@pytest.mark.usefixtures("small")
def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "steps.svg"
    result = run("--table", "stack", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert "</svg>" in path.read_text()
    assert f"plot in {path}" in result.stdout


def test_plot_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is measured."""
    for name in NAMES:
        monkeypatch.setitem(ladder_tables.TABLES, name, lambda device: pytest.fail("it measured"))
    result = run("--table", "long", "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 2
    assert "--table stack" in result.stderr
    result = run("--plot", str(tmp_path / "x.what"))
    assert result.exit_code == 2
    assert "should end with one of" in result.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with mock.patch.object(importlib.util, "find_spec", return_value=None):
        result = run("--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 2
    assert "pip install 'flashtile[plot]'" in result.stderr


def test_a_table_that_fails_and_an_interruption_lose_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def table(name: str, error: type[BaseException] | None) -> Measurement:
        yield "measuring"
        if error is not None:
            raise error("no such kernel")
        return Table(name, name, [{"n": 1}])

    errors = {"intensity": None, "long": RuntimeError, "tiles": None, "rounding": KeyboardInterrupt}
    for name, error in errors.items():
        monkeypatch.setitem(ladder_tables.TABLES, name, lambda device, name=name, error=error: table(name, error))
    words = [word for name in ("intensity", "long", "tiles") for word in ("--table", name)]
    result = run(*words, "--json")
    tables = json.loads(result.stdout)["tables"]
    assert result.exit_code == 1
    assert {name: len(x["rows"]) for name, x in tables.items()} == {"intensity": 1, "long": 0, "tiles": 1}
    assert tables["long"]["notes"] == ["Failed: RuntimeError: no such kernel"]
    result = run(*words, "--table", "rounding")
    assert result.exit_code == 1
    assert "Failed: RuntimeError: no such kernel" in result.stdout
    assert result.stdout.count("n\n1\n") == 2


@pytest.mark.usefixtures("small")
def test_words() -> None:
    result = run("--table", "stack", "--table", "tiles")
    assert result.exit_code == 0, result.output
    for word in ("2 scalar autograd", "(0.209)", "N = 16", "11 flashtile.attention", "64 x 192", torch.__version__):
        assert word in result.stdout
