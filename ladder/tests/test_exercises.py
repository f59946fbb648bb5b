"""Exercises: solutions pass, known mistakes are named, and the command goes all the way round."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from flashtile_ladder import __main__, step04_standard
from flashtile_ladder._host import alone, cpp, cuda_launch, gluon_emulation, triton_or_not
from flashtile_ladder.exercises import EMPTY, EXERCISES, Exercise, Mistake, banks, barriers, source_of
from flashtile_ladder.exercises.command import main
from flashtile_ladder.exercises.judge import judge, probes

# Ten in every run, one for each kind of probe and of program; all of them with `-m course`.
QUICK_MISTAKES = {"1a": 0, "9e": 2, "2b": 3, "3a": 0, "4a": 2, "5a": 3, "5b": 4, "6a": 0, "7b": 4, "9a": 0}
SLOW = ("3b", "8a", "8b", "8c", "9a", "9b", "9c", "9e")  # test_in_the_interpreter has one of step 8 in every run
MISTAKES = [
    pytest.param(name, mistake, marks=() if QUICK_MISTAKES.get(name) == place else pytest.mark.course)
    for name, exercise in EXERCISES.items()
    for place, mistake in enumerate(exercise.mistakes)
]


def checked(file: Path) -> tuple[int, str]:
    """Exit code and words of `check`; in a process of its own for Triton, whose interpreter is switched on before."""
    if "8" not in file.name:
        done = CliRunner().invoke(main, ["check", str(file)])
        return done.exit_code, done.output
    folder = str(Path(__main__.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "flashtile_ladder", "check", str(file)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    return run.returncode, run.stdout + run.stderr


def need(exercise: Exercise) -> None:
    """Skip where a compiler or Triton is not there."""
    if exercise.form == "triton" and not triton_or_not.INSTALLED:
        pytest.skip("Triton is not installed")
    if (exercise.language != ".py" or exercise.module == "exercises.barriers") and cpp.compiler() is None:
        pytest.skip("there is no C++ compiler")


def written(exercise: Exercise, heart: str) -> str:
    """The file that the command writes, with these lines in its hole."""
    text, empty = exercise.empty(), EMPTY[exercise.language]
    indent = next(line for line in text.splitlines() if empty in line).partition(empty)[0]
    return text.replace(indent + empty, heart)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.course if name in SLOW else ()) for name in EXERCISES]
)
def test_solution_passes_in_the_file_that_was_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exercise, run = EXERCISES[name], CliRunner().invoke
    need(exercise)
    file = tmp_path / exercise.file
    assert run(main, ["exercise", name]).exit_code == 0
    assert file.read_text() == exercise.empty()
    empty = run(main, ["check", str(file)])
    assert empty.exit_code == 1
    assert "Nothing is written yet" in empty.output
    assert exercise.solution() == run(main, ["exercise", name, "--solution"]).output.removesuffix("\n")
    file.write_text(written(exercise, exercise.heart()))
    assert checked(file) == (0, f"Right on all {len(probes(exercise))} probes.\n")


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_mistakes_are_named(name: str, mistake: Mistake, tmp_path: Path) -> None:
    """Each by its own name: no two of an exercise have the same results."""
    exercise = EXERCISES[name]
    need(exercise)
    file = tmp_path / exercise.file
    file.write_text(written(exercise, exercise.heart().replace(mistake.old, mistake.new)))
    code, words = checked(file)
    assert code == 1
    assert f"This looks like a well-known mistake: {mistake.name}." in words, words


def test_sixty_mistakes_are_known() -> None:
    """And each is one place of the heart, which `with_mistake` looks at."""
    assert sum(len(exercise.mistakes) for exercise in EXERCISES.values()) >= 60
    for exercise in EXERCISES.values():
        sources = {exercise.with_mistake(mistake) for mistake in exercise.mistakes} | {exercise.source()}
        assert len(sources) == len(exercise.mistakes) + 1
        assert exercise.heart().count("{") == exercise.heart().count("}"), "no half of a block is left over"


def test_a_compiler_is_quoted(tmp_path: Path) -> None:
    exercise = EXERCISES["9a"]
    need(exercise)
    (tmp_path / exercise.file).write_text(written(exercise, "m_row = no_such_thing;"))
    code, words = checked(tmp_path / exercise.file)
    assert code == 1
    assert "failed:" in words
    assert "no_such_thing" in words


def test_a_kernel_that_waits_for_ever_ends() -> None:
    """Without a time limit: the emulation sees that no thread can go on."""
    exercise = replace(EXERCISES["9a"], mistake=())
    need(exercise)
    stuck = exercise.source().replace(exercise.heart(), f"{exercise.heart()} if (threadIdx.x == 0) __syncthreads();")
    verdict = judge(exercise, exercise.compiled(stuck))
    assert not verdict.right
    assert "threads wait at a barrier that others do not reach" in verdict.text


def test_without_a_gpu_steps_run_in_the_emulation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    need(EXERCISES["9a"])
    for variable in ("NUMBA_ENABLE_CUDASIM", "TRITON_INTERPRET"):  # which the command sets: put back after
        monkeypatch.setenv(variable, "0")
    monkeypatch.setattr(alone, "SECONDS", 0.0)
    before = torch.get_num_threads()
    with pytest.raises(SystemExit) as end:
        __main__.main(["--emulate", "step09_cuda_rows"])
    torch.set_num_threads(before)
    assert end.value.code == 0
    assert os.environ["TRITON_INTERPRET"] == os.environ["NUMBA_ENABLE_CUDASIM"] == "1"
    printed = capsys.readouterr().out
    assert re.search(r"largest error, from fp64 +\d\.\de-0[78]", printed)
    assert "ms of an emulation" in printed
    assert cuda_launch.emulated is None


def uncorrected_sum(x: torch.Tensor) -> torch.Tensor:
    """The first mistake of 1a in other words: each term keeps the maximum of its own time."""
    largest = x.cummax(0).values
    return torch.exp(x - largest[-1]) / torch.exp(x - largest).sum()


def test_results_count_and_not_words() -> None:
    exercise = EXERCISES["1a"]
    assert judge(exercise, lambda x: torch.softmax(x, 0)).right
    assert judge(exercise, uncorrected_sum).mistake == exercise.mistakes[0].name


def test_fewer_probes_would_not_do() -> None:
    """Mistakes that two keys do not find: what masks, bytes and several tiles are for."""
    found = {}
    for name, words in (("5a", "divided by 0"), ("5b", "read again"), ("6a", "accumulator is not corrected")):
        exercise = EXERCISES[name]
        mistake = next(x for x in exercise.mistakes if words in x.name)
        found[name] = judge(exercise, exercise.compiled(exercise.with_mistake(mistake))).text.partition("\n")[0]
    assert "a mask that hides a whole row" in found["5a"]
    assert "bytes read and written" in found["5b"]
    assert "N = 4" in found["6a"]  # in one tile, of two keys, nothing has been added up before


@pytest.mark.parametrize("wrong", [None, (), "text", (None, None)])
def test_results_of_a_wrong_kind_are_told(wrong: object) -> None:
    for name in ("1a", "2a", "5b", "6a"):
        verdict = judge(EXERCISES[name], lambda *_, **__: wrong)
        assert not verdict.right
        assert verdict.text.startswith("Wrong on 'one key'"), verdict.text


def test_a_barrier_that_is_not_predicted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "holds", lambda name, n: True)
    verdict = judge(EXERCISES["9c"], lambda: {"rows, the tile is there": {16, 32, 33, 65}})
    assert verdict.text.startswith("Wrong on 'a prediction', N = 16, d = 16: there is no 'rows, the tile is read'")
    predicted = {name: {16, 32} for name in barriers.CASES}
    assert (
        "At N = 33, without the barrier of 'rows, the tile is there', the result is right"
        in judge(EXERCISES["9c"], lambda: predicted).text
    )


def test_banks_that_are_not_predicted_are_told() -> None:
    predicted = banks.predicted() | {"rows as they are": {16}}
    verdict = judge(EXERCISES["9d"], lambda: predicted)
    assert verdict.text.startswith("At d = 16, 'rows as they are' takes 2 turns: not as predicted")


@pytest.mark.parametrize("order", range(2))
def test_a_load_that_overtakes_is_seen(order: int) -> None:
    """The other roles of 9e in the emulation: without its wait the load warp fills a buffer that is still read."""
    exercise = EXERCISES["9e"]
    loads = source_of(exercise.path, "loads")
    wait = f"hopper.mbarrier.wait({'kv'[order]}_empty.index(stage), phase ^ 1)"
    assert loads.count(wait) == 1
    q = torch.randn(520, 16)
    right, *wrong = (
        {"loads": replace(exercise, function="loads").compiled(x)} for x in (loads, loads.replace(wait, "pass"))
    )
    exact = step04_standard.attention(q.double(), q.double(), q.double())[0]
    assert float((gluon_emulation.attention(right, q, q, q, False, 0.25)[0] - exact).abs().max()) < 1e-4
    with pytest.raises(gluon_emulation.EmulationError, match=r"which role goes first|nobody completes"):
        gluon_emulation.attention(wrong[0], q, q, q, False, 0.25)


def test_exercises_are_listed_by_the_package_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["exercise"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(EXERCISES)


def test_an_unknown_mistake_is_shown_with_its_numbers() -> None:
    verdict = judge(EXERCISES["1a"], lambda x: 0 * x)
    assert verdict.text.startswith("Wrong on 'one key', N = 1, d = 1: softmax[0] is 0, not 1")
    assert not verdict.mistake


def test_hints_come_in_stages_and_a_file_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    for stage, hint in enumerate(EXERCISES["6a"].hints, 1):
        assert run(main, ["exercise", "6", "--hint", str(stage)]).output == f"{hint}\n"
    assert "has 2 hints" in run(main, ["exercise", "6", "--hint", "3"]).output
    assert run(main, ["exercise", "6"]).exit_code == 0
    assert "is there already" in run(main, ["exercise", "6"]).output
    assert "no exercise is called" in run(main, ["exercise", "11"]).output
