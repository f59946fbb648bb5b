"""`python -m flashtile_ladder exercise` and `check`."""

import os
from pathlib import Path

import click

from .._host.cpp import CompilerError
from . import COMMENTS, EMPTY, EXERCISES, HEADER, Exercise
from .judge import judge


@click.group()
def main() -> None:
    """Exercises with a judge."""


def named(name: str) -> Exercise:
    """`6b`, or `6` for 6a."""
    found = EXERCISES.get(name) or EXERCISES.get(f"{name}a")
    if found is None:
        raise click.UsageError(f"no exercise is called {name!r}; there are {', '.join(EXERCISES)}")
    return found


@main.command("exercise")
@click.argument("name", required=False)
@click.option("--hint", type=click.IntRange(min=1), help="Print this hint, 1 first, and write nothing.")
@click.option("--solution", is_flag=True, help="Print the lines of the step, and write nothing.")
def write(name: str | None, hint: int | None, solution: bool) -> None:
    """Write exercise NAME into this folder; without a name, list all."""
    if name is None:
        click.echo("\n".join(f"{key}  {exercise.title}" for key, exercise in EXERCISES.items()))
        return
    exercise = named(name)
    if solution:
        click.echo(exercise.solution())
        return
    if hint is not None:
        if hint > len(exercise.hints):
            raise click.UsageError(f"exercise {exercise.name} has {len(exercise.hints)} hints; --solution is next")
        click.echo(exercise.hints[hint - 1])
        return
    path = Path(exercise.file)
    if path.exists():
        raise click.UsageError(f"{path} is there already: move it away to begin again")
    path.write_text(exercise.empty(), encoding="utf-8")
    click.echo(f"{exercise.text}\n\nFill in {path}, then: python -m flashtile_ladder check {path}")


@main.command("check")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def check(file: Path) -> None:
    """Judge a FILE that `exercise` wrote. The file is run, for as long as it takes."""
    text, header = file.read_text(encoding="utf-8"), COMMENTS.get(file.suffix, "#") + HEADER
    first = text.partition("\n")[0]
    if not first.startswith(header):
        raise click.UsageError(f"{file} does not begin with {header!r} and a name: keep the line that `exercise` wrote")
    exercise = named(first.removeprefix(header).partition(":")[0])
    if EMPTY[exercise.language] in text:
        click.echo(f"Nothing is written yet: `{EMPTY[exercise.language]}` is still there.")
        raise SystemExit(1)
    if exercise.form == "triton":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    try:
        function = exercise.of_file(file)
    except CompilerError as problem:
        click.echo(str(problem))
        raise SystemExit(1) from None
    if function is None:
        raise click.UsageError(f"{file} defines no function {exercise.function}")
    verdict = judge(exercise, function)
    click.echo(verdict.text)
    raise SystemExit(0 if verdict.right else 1)
