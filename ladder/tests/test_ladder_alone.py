"""`python -m flashtile_ladder STEP`: a step prints a result, its error, its bytes, and its time against the last."""

import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashtile_ladder import STEPS, __main__, iomodel, step01_softmax, step02_floats
from flashtile_ladder._host import alone, cuda_compile
from flashtile_ladder._host import cpp as step03_cpp
from flashtile_ladder.iomodel import Shape
from flashtile_ladder.measure.counted import count

FOLDER = Path(alone.__file__).parents[1]
PAGE = Path(__file__).parents[1] / "docs" / "ladder.md"
ON_A_CPU = [step for step in STEPS if not step.on_gpu]


def missing(module: str) -> bool:
    """Whether this machine lacks the step's compiler."""
    if module == "step03_cpp":
        return step03_cpp.compiler() is None
    return module == "step07_numba" and importlib.util.find_spec("numba") is None


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Running a step leaves one thread."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "SMALL", (8, 16))
    monkeypatch.setattr(alone, "LARGE", (128, 16))
    monkeypatch.setattr(alone, "SECONDS", 0.0)


def test_the_folder_shows_the_course() -> None:
    """20 steps, each one file, and at most five files beside them; all else lies in folders below."""
    files = {path.name for path in FOLDER.iterdir() if path.is_file()}
    steps = {step.file for step in STEPS}
    assert len(STEPS) == len(steps) == 20
    assert steps <= files
    assert files - steps == {"__init__.py", "__main__.py", "py.typed", "step09_instructions.cuh", "steps.toml"}
    folders = {path.name for path in FOLDER.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == {"_host", "related", "measure", "exercises", "iomodel", "cli"}


def test_every_step_can_be_run() -> None:
    for step in STEPS:
        first = (FOLDER / step.file).read_text().lstrip('/" ')
        assert first.startswith(f"Step {step.number}"), step.file
        assert step.after == "" or step.after in {other.module for other in STEPS}


def test_the_list_of_steps(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name all steps and what to run; with a number its steps, with a file one; else an error."""
    __main__.main([])
    printed = capsys.readouterr().out
    assert all(step.file in printed and step.changed in printed for step in STEPS)
    assert "python -m flashtile_ladder 1" in printed
    ran: list[str] = []
    monkeypatch.setattr(__main__, "run", lambda file, steps: ran.append(file) or len(ran) - 1)
    calls = ((["2"], ["step02_autograd.py", "step02_floats.py"], 1), (["step03_cpp"], ["step03_cpp.cpp"], 0))
    for names, files, code in calls:
        ran.clear()
        with pytest.raises(SystemExit) as ended:
            __main__.main(names)
        assert (ran, ended.value.code) == (files, code)
    with pytest.raises(SystemExit, match="no step is called 12"):
        __main__.main(["12"])


def test_host_code_says_so_in_its_first_line() -> None:
    """The code after step 8's kernels, and all of `_host`."""
    line = "\n# Host code: skip it when you learn.\n"
    for path in FOLDER.glob("step08*.py"):
        before, after = path.read_text().split(line)
        assert "@triton.jit" in before
        assert "@triton.jit" not in after
        assert after.startswith(("def attention(", "attention = "))
    for path in (FOLDER / "_host").glob("*.py"):
        assert path.read_text().startswith('"""Skip this f')


def test_every_module_runs_by_itself() -> None:
    """Those that are no step have a program of their own; host code has nothing to run."""
    for folder in ("related", "measure"):
        for path in (FOLDER / folder).glob("*.py"):
            assert ("\ndef main() -> None:\n" in path.read_text()) == (path.stem != "__init__"), path
            assert (f"{folder}.{path.stem}" in __main__.PROGRAMS) == (path.stem != "__init__")


def test_a_module_is_run_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    __main__.main(["related.flash3"])
    assert "ping-pong" in capsys.readouterr().out


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("module", [step.module for step in ON_A_CPU])
def test_a_step_prints_what_it_does(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    if missing(module):
        pytest.skip("its compiler is not installed")
    assert alone.run(next(step.file for step in STEPS if step.module == module)) == 0
    printed = capsys.readouterr().out
    found = re.search(r"largest error, from fp64 +(\S+)", printed)
    assert found is not None
    assert float(found[1]) < 1e-5
    assert re.search(r"bytes .*(counted|loops)", printed)
    assert re.search(r"time +\S+ ms", printed)
    assert re.search(r"^why +\S", printed, re.MULTILINE), "a time has a reason"
    assert re.search(r"^still open +\S", printed, re.MULTILINE)
    titles = [line.partition("  ")[0] for line in printed.splitlines()]
    assert titles.index("bytes") < titles.index("time"), "bytes first"
    assert any(title.startswith("those of step") for title in titles) == (module != "step01_softmax")
    assert "times as slow" not in printed


def test_the_page_has_the_bytes_that_steps_print() -> None:
    """What a reader should see, where it is the same on every machine."""
    shown = dict(re.findall(r"<!-- bytes: (\w+) -->\n```text\n(.*)\n```", PAGE.read_text(encoding="utf-8")))
    steps = [step for step in STEPS if step.module in shown]
    assert len(steps) == len(shown) == 9
    for step in steps:
        assert shown[step.module] == str(alone.bytes_moved(step, *alone.inputs(step))), step.module


def test_the_sentence_of_four_tokens() -> None:
    """The page's first example, by step 2 on its rows; and the merge of its halves."""
    page = PAGE.read_text(encoding="utf-8")
    lines = re.findall(r"^(?:the|cat|sat|down) +((?:\d +){7}\d)$", page, re.MULTILINE)
    rows = [[float(x) for x in line.split()] for line in lines]
    out, lse = step02_floats.attention([[1.0] * 4] * 4, [row[:4] for row in rows], [row[4:] for row in rows])
    words = [f"{x:.3f}" for x in out[3]]
    assert words == ["0.032", "0.411", "0.237", "0.644"]
    assert f"({' '.join(words)})" in page
    assert f"= {lse[3]:.3f};" in page
    scores = torch.tensor([1.0, 2.0, 3.0, 4.0])
    parts = [step01_softmax.normalizer(x) for x in scores.split(2)]
    assert all(f"l = {part.l:.3f}" in page for part in parts)
    assert f"= {step01_softmax.merge(*parts).l:.3f}" in page


def test_every_section_ends_with_an_exercise_and_the_page_with_its_answer() -> None:
    """And what the answers say in figures is so."""
    page, _, answers = PAGE.read_text(encoding="utf-8").partition("\n## Answers\n")
    course = page[page.index("\n## What attention is\n") :]
    sections = course.split("\n## ")[1:]
    for section in sections:
        marks = [section.rindex(mark) for mark in ("**Run**", "**You should see**", "**Why.**", "**Exercise.**")]
        assert marks == sorted(marks), section[:40]
    titles = [section.partition("\n")[0] for section in sections]
    assert re.findall(r"^- \*\*(.*?)\.\*\*", answers, re.MULTILINE) == titles
    weights = torch.softmax(torch.tensor([2.0, 4.0, 6.0, 8.0]), 0)
    assert ", ".join(f"{x:.3f}" for x in weights) in answers
    n, d = 64, 16
    assert f"4 N² d = {4 * n * n * d:,}" in answers
    standard = next(step for step in STEPS if step.module == "step04_standard")
    moved = alone.bytes_moved(standard, *torch.randn(3, 1024, 64))
    assert isinstance(moved, alone.Bytes)
    assert f"{moved.read / 1e6:.3g} MB read and {moved.written / 1e6:.3g} MB written" in answers
    shape, memory = iomodel.Shape.square(4096, 128), iomodel.ON_CHIP_BYTES["A100"]
    gain = iomodel.standard_forward(shape).moved / iomodel.flash1_forward(shape, memory).moved
    assert f"falls to {gain:.2f}" in answers


def test_bytes_are_those_of_the_model() -> None:
    q, k, v = (torch.randn(alone.LARGE) for _ in range(3))
    shape = Shape.square(*alone.LARGE)
    expected = {
        "step04_standard": iomodel.standard_forward(shape),
        "step06_flash2": iomodel.flash2_forward(shape, 128, 128),
        "step08_triton_lse": iomodel.flash2_forward(shape, 64, 64),
    }
    for step in STEPS:
        if (work := expected.get(step.module)) is not None:
            moved = alone.bytes_moved(step, q, k, v)
            assert moved[:2] == (work.read, work.written), step.module


def test_a_wrong_step_has_a_large_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("flashtile_ladder.step06_flash2")
    right = module.attention
    monkeypatch.setattr(alone, "LARGE", (128, 16))
    monkeypatch.setattr(alone, "SECONDS", 0.0)
    monkeypatch.setattr(module, "attention", lambda q, k, v: right(q, k, v[:] * 1.5) if len(q) else None)
    assert alone.run("step06_flash2.py") == 0
    found = re.search(r"largest error, from fp64 +(\S+)", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) > 0.01


def test_step_1_on_counted_tensors() -> None:
    """Each row reads all keys and values once, and itself once."""
    n, d = 5, 8
    counts, (out, _) = count(STEPS[0].load().attention, [torch.randn(n, d) for _ in range(3)])
    assert counts["read"] == 4 * (n * d + 2 * n * n * d)
    assert counts["written"] == 4 * (n * d + n)
    assert out.isfinite().all()


def test_a_program_that_cannot_run_says_so() -> None:
    def main() -> None:
        raise cuda_compile.CudaUnavailableError("there is no GPU")

    with pytest.raises(SystemExit, match=r"^cannot run: there is no GPU$"):
        alone.guarded(main)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("name", ["step09_cuda_warps", "step01_softmax"])
def test_as_a_program(
    name: str, small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `python -m` runs it: a step that needs a GPU says so where there is none, and the program fails."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setattr(sys, "argv", ["flashtile_ladder", name])
    fails = name.startswith("step09")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("flashtile_ladder", run_name="__main__")
    assert ended.value.code == fails
    printed = capsys.readouterr().out
    assert ("cannot run: step 9 of the ladder is CUDA C++" in printed) == fails
    assert ("CUDA C++, warps" in printed) == fails


def test_the_simulator_gets_a_small_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute for each call at N = 512."""
    step = next(step for step in STEPS if step.module == "step07_numba_cuda")
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert alone.inputs(step)[0].shape == alone.SIMULATED
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM")
    assert alone.inputs(step)[0].shape == alone.LARGE
