"""`flashtile-ladder`: what its tables hold, on problems smaller than the command's own, and what it says is missing."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result

from flashtile_ladder import iomodel
from flashtile_ladder._host import cpp as step03_cpp
from flashtile_ladder._host import triton_or_not
from flashtile_ladder.cli import approximate, features, lite, long, pointwise, stack, stored, tiles
from flashtile_ladder.cli import tables as ladder_tables
from flashtile_ladder.cli.command import NAMES, main
from flashtile_ladder.cli.measure import DISTURBED, Measurement, Table, disturbed
from flashtile_ladder.cli.measure import timed as really_timed
from flashtile_ladder.iomodel import Shape


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def run_json(*words: str) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences, and no time spent on times."""
    monkeypatch.setattr(stack, "STACK_LENGTHS", (8, 16))
    monkeypatch.setattr(long, "LONG_LENGTHS", (1024,))
    monkeypatch.setattr(tiles, "TILES_LENGTH", 256)
    monkeypatch.setattr(tiles, "WIDTHS_LENGTH", 512)
    monkeypatch.setattr(features, "FEATURES_LENGTH", 128)
    monkeypatch.setattr(features, "BACKWARD_LENGTH", 128)
    monkeypatch.setattr(pointwise, "POINTWISE_LENGTH", 64)
    for name, value in {"LINEAR_LENGTHS": (128,), "FEATURES_LENGTH": 128, "HASHED_LENGTHS": (256,)}.items():
        monkeypatch.setattr(approximate, name, value)
    for module in (stack, long, tiles, features, pointwise, approximate):
        monkeypatch.setattr(module, "timed", timed)


def timed(run: Any, device: torch.device, seconds: float = 0.0, prefix: str = "") -> dict[str, float]:
    """One run, which is said to take a millisecond."""
    run()
    return {f"{prefix}ms": 1.0, f"{prefix}median_ms": 1.0}


@pytest.mark.usefixtures("small")
def test_stack() -> None:
    table = run_json("--table", "stack")["tables"]["stack"]
    assert table["see"]
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


def only(monkeypatch: pytest.MonkeyPatch, numbers: str) -> None:
    """Leave the steps with these numbers: the others take their time elsewhere."""
    steps = stack.stack_steps
    monkeypatch.setattr(
        stack, "stack_steps", lambda device: {name: x for name, x in steps(device).items() if name[0] in numbers}
    )


@pytest.mark.usefixtures("small")
def test_stack_has_the_first_triton_kernel_where_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; here step 6 stands for the kernel."""
    monkeypatch.setattr(stack, "STACK_LENGTHS", (8, 64))
    only(monkeypatch, "8")
    monkeypatch.setattr(stack, "triton_compiles", lambda device: True)
    monkeypatch.setattr(stack.step08_triton_lite, "attention", stack.step06_flash2.attention)
    any_size = lambda q, k, v, softmax: stack.step06_flash2.attention(q, k, v)  # noqa: E731
    monkeypatch.setattr(stack.triton_any_size, "attention", any_size)
    rows = run_json("--table", "stack")["tables"]["stack"]["rows"]
    assert [row["n"] for row in rows if row["step"] == stack.LITE] == [64]
    assert [row["published_ms"] for row in rows if row["step"] == stack.LITE_ANY] == [0.025, 0.036]


@pytest.mark.usefixtures("small")
def test_stack_finds_a_step_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The errors come from the runs that are timed."""
    only(monkeypatch, "6")
    right = stack.step06_flash2.attention
    with mock.patch.object(stack.step06_flash2, "attention", lambda q, k, v: right(q, k, 0.9 * v)):
        rows = run_json("--table", "stack")["tables"]["stack"]["rows"]
    assert min(row["error"] for row in rows if row["step"] == "6 FlashAttention-2") > 0.01


@pytest.mark.usefixtures("small")
def test_stack_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step03_cpp, "library", step03_cpp.library.__wrapped__)  # without what it has compiled
    monkeypatch.setattr(step03_cpp, "compiler", lambda: None)
    only(monkeypatch, "34")
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
    kept = rows["4 with kept buffers"]
    assert kept["error"] == pytest.approx(three["error"], rel=0.5)
    assert kept["extra_mib"] < 1 < three["extra_mib"]
    assert kept["page_faults"] < 100, "S and P are there"
    assert (standard["published_mib"], fused["published_mib"], fused["published_saving"]) == (8, 0.25, 32)


def test_names() -> None:
    assert tuple(ladder_tables.TABLES) == NAMES


@pytest.mark.usefixtures("small")
def test_backward() -> None:
    rows = {row["step"]: row for row in run_json("--table", "backward")["tables"]["backward"]["rows"]}
    assert all(row["error"] < 1e-5 for row in rows.values())
    assert rows["4 standard, P kept"]["kept_mib"] * 2**20 == 4 * 128 * 128
    assert rows["10 deterministic"]["extra_mib"] > rows["10 compiled variants"]["extra_mib"]


@pytest.mark.usefixtures("small")
def test_features() -> None:
    """Bytes are counted; what dropout keeps is a state, which does not grow with N²."""
    table = run_json("--table", "features")["tables"]["features"]
    rows = {(row["step"], row["feature"]): row for row in table["rows"]}
    flash1 = {feature: row for (step, feature), row in rows.items() if step.startswith("5")}
    memory = 4 * features.step05_flash1.M
    assert flash1["none"]["mb_moved"] * 1e6 == iomodel.flash1_forward(Shape.square(128, 64), memory).moved
    assert flash1["mask"]["mb_moved"] * 1e6 == flash1["none"]["mb_moved"] * 1e6 + 128 * 128
    assert flash1["mask"]["kept_bytes"] == 128 * 128
    assert flash1["dropout"]["kept_bytes"] == torch.Generator().get_state().nbytes
    assert rows["10 compiled variants", "causal"]["mb_moved"] < rows["10 compiled variants", "none"]["mb_moved"]


@pytest.mark.usefixtures("small")
def test_pointwise_and_widths() -> None:
    tables = run_json("--table", "pointwise", "--table", "widths")["tables"]
    rows = {row["operation"]: row for row in tables["pointwise"]["rows"]}
    assert rows["scale, then bias"]["gb_per_s"] == 2 * rows["scale and bias in one"]["gb_per_s"], "twice the accesses"
    assert rows["copy"]["gb_per_s"] == pytest.approx(2 * 4 * 64**2 / 1e-3 / 1e9)
    out: dict[str, torch.Tensor] = {}
    for name in ("scale, then bias", "scale and bias in one"):
        torch.manual_seed(0)
        run = pointwise.operations_on_scores(8, 4, torch.device("cpu"))[name][0]
        cells = dict(zip(run.__code__.co_freevars, run.__closure__ or (), strict=True))
        run()
        out[name] = cells["out"].cell_contents
    torch.testing.assert_close(*out.values())
    moved = [row["bytes_for_1000_flops"] for row in tables["widths"]["rows"]]
    assert moved == sorted(moved)


@pytest.mark.usefixtures("small")
def test_approximate() -> None:
    """Errors fall with features and with rounds; all pairs in a chunk and the one before are a share of all."""
    rows = run_json("--table", "approximate")["tables"]["approximate"]["rows"]
    errors = {
        name: [row["relative_error"] for row in rows if row["method"].startswith(name)]
        for name in ("linear, elu", "linear, random", "hashed")
    }
    assert 0.3 < errors["linear, elu"][0] < 1, "another function"
    for found in (errors["linear, random"], errors["hashed"]):
        assert found == sorted(found, reverse=True)
        assert found[-1] < found[0] / 2
    assert [row["pairs_percent"] for row in rows[-3:]] == [50, 100, 100]


def test_layers() -> None:
    """A transformer's layer as published: 24 N width² + 4 N² width operations; intensity rises, then falls."""
    rows = run_json("--table", "layers")["tables"]["layers"]["rows"]
    base = [row for row in rows if row["model"].startswith("BERT-base")]
    for row in base:
        n = row["n"]
        total = row["projections_gflop"] + row["attention_gflop"] + row["feed_forward_gflop"]
        assert total * 1e9 == pytest.approx(24 * n * 768**2 + 4 * n**2 * 768)
    course = [row["layer_standard"] for row in base]
    assert max(course) > course[0]
    assert max(course) > course[-1]
    fused = [row["layer_fused"] for row in base]
    assert fused == sorted(fused)


# Times and stored runs -----------------------------------------------------------------------------------------------


def test_times_have_a_median_and_a_warning() -> None:
    found = really_timed(lambda: None, torch.device("cpu"), 0.01, prefix="a_")
    assert 0 < found["a_ms"] <= found["a_median_ms"]
    quiet = Table("x", "x", rows=[{"n": 1, "a_ms": 1.0, "a_median_ms": 0.99 * DISTURBED}])
    assert disturbed(quiet) is None
    quiet.rows.append({"n": 2, "a_ms": 1.0, "a_median_ms": 3.0})
    assert "1 of 2 times" in (disturbed(quiet) or "")


@pytest.mark.usefixtures("small")
def test_save_puts_tables_into_a_file(tmp_path: Path) -> None:
    """One by one, each with its machine; a table that is there is replaced and the others stay."""
    path = tmp_path / "run.json"
    for name in ("intensity", "widths", "widths"):
        assert run("--table", name, "--save", str(path)).exit_code == 0
    tables = stored.load(path)
    assert set(tables) == {"intensity", "widths"}
    assert all(table["machine"]["torch"] == torch.__version__ and table["seconds"] > 0 for table in tables.values())
    assert len(tables["widths"]["row_seconds"]) == len(tables["widths"]["rows"])


@pytest.mark.usefixtures("small")
def test_slow_rows_are_stored_ones_unless_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cpu.json"
    assert run("--table", "widths", "--save", str(path)).exit_code == 0
    found = json.loads(path.read_text())
    rows, seconds = (found["tables"]["widths"][name] for name in ("rows", "row_seconds"))
    rows[1]["flash1_ms"], seconds[1] = 1234.5, 2 * stored.SLOW_SECONDS
    path.write_text(json.dumps(found))
    monkeypatch.setattr(stored, "path_for", lambda device: path)
    table = run_json("--table", "widths")["tables"]["widths"]
    assert [row["flash1_ms"] for row in table["rows"]] == [1, 1234.5, 1, 1, 1]
    assert any("Stored, from CPU" in note and "head_dim = 32" in note for note in table["notes"])
    table = run_json("--table", "widths", "--all")["tables"]["widths"]
    assert [row["flash1_ms"] for row in table["rows"]] == [1] * 5


def test_tables_of_a_gpu_are_shown_from_the_stored_run() -> None:
    table = run_json("--table", "coalescing")["tables"]["coalescing"]
    assert len(table["rows"]) == 6
    assert "Stored, from NVIDIA H200" in table["notes"][0]


@pytest.mark.usefixtures("small")
def test_each_table_is_printed_before_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sentence that says what to see, and on one thread."""
    events: list[str] = []

    def table(name: str) -> Measurement:
        events.append(f"{name} on {torch.get_num_threads()}")
        yield "measuring"
        return Table(name, name, [{"n": 1}], see=f"See {name}.")

    for name in ("intensity", "layers"):
        monkeypatch.setitem(ladder_tables.TABLES, name, lambda device, name=name: table(name))
    show = importlib.import_module("flashtile_ladder.cli.show")
    monkeypatch.setattr(show, "show_table", lambda table: events.append(table.see))
    assert run("--table", "intensity", "--table", "layers").exit_code == 0
    assert events == ["intensity on 1", "See intensity.", "layers on 1", "See layers."]


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
    monkeypatch.setattr(lite, "LITE_PUBLISHED", {64: 0.002, 128: 0.761})
    rows = run_json("--table", "lite")["tables"]["lite"]["rows"]
    assert [(row["n"], row["tiles"]) for row in rows] == [(64, 1), (128, 2)]
    assert all(row["online"] < 1e-5 for row in rows)
    assert all(5e-4 < row["online_tf32"] < 5e-3 for row in rows), "the published errors of online, 0.001 to 0.002"
    assert rows[0]["lite"] < 1e-5
    assert rows[1]["lite"] > 0.1


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
    assert "pip install 'flashtile-ladder[plot]'" in result.stderr


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
