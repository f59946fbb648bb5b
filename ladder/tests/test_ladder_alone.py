"""`python -m flashtile_ladder.step...`: a step prints a result, its error, its bytes, and its time against the last."""

import importlib.util
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flashtile_ladder import STEPS, alone, cuda_compile, iomodel, step03_cpp
from flashtile_ladder.counted import count
from flashtile_ladder.iomodel import Shape

FOLDER = Path(alone.__file__).parent
ON_A_CPU = [step for step in STEPS if step.module not in alone.ON_GPU]


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


def test_every_step_can_be_run() -> None:
    for path in FOLDER.glob("step*.py"):
        assert path.read_text().endswith(
            'if __name__ == "__main__":\n    from .alone import run\n\n    run(__file__)\n'
        )
    assert {path.stem for path in FOLDER.glob("step*.py")} == {step.module for step in STEPS}


def test_host_code_says_so_in_its_first_line() -> None:
    """All code of step 9's modules, that after step 8's kernels, and files that are nothing else."""
    line = "\n# Host code: skip it when you learn.\n"
    for path in FOLDER.glob("step08*.py"):
        before, after = path.read_text().split(line)
        assert "@triton.jit" in before
        assert "@triton.jit" not in after
        assert after.startswith("def attention(")
    for path in FOLDER.glob("step09*.py"):
        before, after = path.read_text().split(line)
        assert before.endswith('"""\n')
    for name in ("alone", "cuda_compile", "cuda_launch", "triton_or_not"):
        assert (FOLDER / f"{name}.py").read_text().startswith('"""Skip this file when you learn: ')


def test_every_module_runs_by_itself() -> None:
    """Those that are no step have a program of their own; host code has nothing to run."""
    helpers = {"__init__", "report", "alone", "cuda_compile", "cuda_launch", "triton_or_not"}
    for path in FOLDER.glob("*.py"):
        if path.stem == "__main__":
            continue
        assert ('if __name__ == "__main__":\n' in path.read_text()) == (path.stem not in helpers), path


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("module", [step.module for step in ON_A_CPU])
def test_a_step_prints_what_it_does(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    if missing(module):
        pytest.skip("its compiler is not installed")
    alone.run(str(FOLDER / f"{module}.py"))
    printed = capsys.readouterr().out
    found = re.search(r"largest error, from fp64 +(\S+)", printed)
    assert found is not None
    assert float(found[1]) < 1e-5
    assert re.search(r"bytes .*(counted|loops)", printed)
    assert re.search(r"time +\S+ ms", printed)
    assert ("this one is" in printed) == (module != "step01_softmax")


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
            words = alone.bytes_moved(step, step.load(), q, k, v)
            assert words.startswith(alone.megabytes(work.read, work.written)), step.module


def test_a_wrong_step_has_a_large_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("flashtile_ladder.step06_flash2")
    right = module.attention
    monkeypatch.setattr(alone, "LARGE", (128, 16))
    monkeypatch.setattr(alone, "SECONDS", 0.0)
    monkeypatch.setattr(module, "attention", lambda q, k, v: right(q, k, v[:] * 1.5) if len(q) else None)
    alone.run(str(FOLDER / "step06_flash2.py"))
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
def test_as_a_program_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """As `python -m` runs it: a step that needs a GPU says so, and the program fails."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("flashtile_ladder.step09_cuda_warps", run_name="__main__")
    assert ended.value.code == 1
    printed = capsys.readouterr().out
    assert "Step 9, CUDA C++, warps" in printed
    assert "cannot run: step 9 of the ladder is CUDA C++" in printed
