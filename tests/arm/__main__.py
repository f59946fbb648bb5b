"""Random problems on emulated ARM processors against the fp64 oracle; a CSV file of the counts. Every eighth has a term
of distances in a table, which random formulas do not have.
"""

import csv
import sys
import time
from pathlib import Path

import click
import torch

from flashtile import score_mods
from flashtile.errors import BackendError
from flashtile.testing.case import Case, ScoreFunction
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

from .emulation import PROCESSORS, emulated, missing

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "arm.csv"


def tabulated_case(seed: int) -> Case:
    """A call whose kernels read T5's buckets of distances from a table, with gradients."""
    g = torch.Generator().manual_seed(seed)
    rows, keys, heads = (int(torch.randint(1, most, (), generator=g)) for most in (200, 200, 4))
    dtype = (torch.float32, torch.float64, torch.bfloat16)[seed // 8 % 3]
    q, k, v, dout = (torch.randn(2, heads, n, 24, generator=g).to(dtype) for n in (rows, keys, keys, rows))
    buckets = torch.randn(32, heads, generator=g)
    score_mod = score_mods.t5_buckets(buckets, max_distance=20)
    function = ScoreFunction(score_mod.fn, score_mod.tensors)
    return Case("attention", {"q": q, "k": k, "v": v, "score_mod": function}, dout=dout, seed=seed)


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
            case = tabulated_case(number) if number % 8 == 7 else random_case(number)
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
