"""Random problems on emulated ARM processors against the fp64 oracle; a CSV file of the counts."""

import csv
import sys
import time
from pathlib import Path

import click

from flashtile.errors import BackendError
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

from .emulation import PROCESSORS, emulated, missing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "arm.csv"


@click.command()
@click.option(
    "--processor", type=click.Choice(list(PROCESSORS)), required=True, help="One a process: LLVM keeps options."
)
@click.option("--cases", default=40, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--seconds", default=600.0, show_default=True, help="Begin no problem after this time.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(processor: str, cases: int, seed: int, seconds: float, out: Path) -> None:
    """Exit code 1 if a result is outside of its error bound."""
    if (reason := missing()) is not None:
        raise click.ClickException(reason)
    run = declined = 0
    wrong: list[str] = []
    start = time.monotonic()
    with emulated(PROCESSORS[processor]) as emulation:
        for number in range(seed, seed + cases):
            if time.monotonic() - start > seconds:
                break
            case = random_case(number)
            try:
                results = case.run("cpu")
            except BackendError:
                declined += 1
                continue
            run += 1
            wrong += [f"{number}: {case.description}: {x}" for x in compare(results, case, solve(case)) if not x.ok]
        launches, kernels = emulation.launches, len(emulation.programs)
    row = {
        "processor": processor, "first_seed": seed, "problems": run, "declined": declined, "kernels": kernels,
        "launches": launches, "wrong": len(wrong),
    }  # fmt: skip
    click.echo("\n".join([*wrong, str(row)]))
    rows = {x["processor"]: x for x in csv.DictReader(out.open(newline=""))} if out.exists() else {}
    rows[processor] = row
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(row))
        writer.writeheader()
        writer.writerows(rows[name] for name in PROCESSORS if name in rows)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
