"""Exercises: solutions pass, known mistakes are named, and the command goes all the way round."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from flashtile_ladder import __main__
from flashtile_ladder.exercises import EMPTY, EXERCISES, Mistake
from flashtile_ladder.exercises.command import main
from flashtile_ladder.exercises.judge import judge

MISTAKES = [(name, mistake) for name, exercise in EXERCISES.items() for mistake in exercise.mistakes]


@pytest.mark.parametrize("name", EXERCISES)
def test_solution_passes_in_the_file_that_was_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exercise, run, file = EXERCISES[name], CliRunner().invoke, Path(f"exercise_{name}.py")
    assert run(main, ["exercise", name]).exit_code == 0
    empty = run(main, ["check", str(file)])
    assert empty.exit_code == 1
    assert "Nothing is written yet" in empty.output
    text = file.read_text()
    indent = next(line for line in text.splitlines() if EMPTY in line).partition("raise")[0]
    assert exercise.solution() == run(main, ["exercise", name, "--solution"]).output.removesuffix("\n")
    file.write_text(text.replace(indent + EMPTY, exercise.heart()))
    done = run(main, ["check", str(file)])
    assert (done.exit_code, done.output[:5]) == (0, "Right"), (done.output, done.exception)


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_mistakes_are_named(name: str, mistake: Mistake) -> None:
    """Each by its own name: no two of an exercise have the same results."""
    exercise = EXERCISES[name]
    verdict = judge(exercise, exercise.compiled(exercise.with_mistake(mistake)))
    assert not verdict.right
    assert verdict.mistake == mistake.name, verdict.text


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
    assert "no exercise is called" in run(main, ["exercise", "8"]).output
