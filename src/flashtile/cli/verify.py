"""`flashtile verify`: check every backend against the contract, on this machine, with this PyTorch."""

import math
import shlex
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..bench.captured import Source, captured
from ..dispatch.status import backends as all_backends
from ..errors import BackendError
from ..progress import progress
from ..text_table import TextTable
from ..verification.examine import Outcome, Problems, Report, Tally, default_jobs, dtype_name, examine
from . import recorded as records
from .options import (
    UsageError,
    arch_option,
    device,
    dtype,
    input_file,
    install_arch,
    integer,
    json_option,
    number,
    option,
    output_file,
    print_json,
)

SHOWN_FAILURES = 20


def arguments(parser: ArgumentParser) -> None:
    several = {"action": "append", "default": []}
    option(parser, "--backend", dest="backends", help="By name; may be repeated. [default: all usable]", **several)
    option(parser, "--cases", type=integer(0), default=200, help="How many seeds of random problems.")
    option(
        parser,
        "--variations",
        type=integer(1),
        default=1,
        help="Problems of each seed. They share compiled kernels, and differ in lengths and values.",
    )
    option(parser, "--variation", type=integer(0), help="Only this one of each seed's problems.")
    option(
        parser,
        "--long",
        dest="long_cases",
        type=integer(0),
        default=8,
        help="How many problems with up to 2**20 keys or rows.",
    )
    option(
        parser,
        "--seed",
        dest="first",
        type=integer(0),
        help="Of the first problem; the next are +1. [default: 0, or the first that --record's table does not have]",
    )
    option(parser, "--device", type=device, default="cpu")
    arch_option(parser)
    option(parser, "--dtype", dest="dtypes", type=dtype, help="May be repeated. [default: all]", **several)
    option(
        parser,
        "--inputs",
        choices=("random", "captured"),
        default="random",
        help="Values of q, k and v: random, or those of a small GPT that is trained for some seconds first.",
    )
    option(parser, "--jobs", type=integer(1), help="Processes. [default: CPU cores, at most 8]")
    option(parser, "--seconds", type=number(0), help="Begin no seed after this time. [default: no limit]")
    option(parser, "--record", type=output_file, help="Append a row for each backend to a CSV file.")
    option(parser, "--recorded", type=input_file, help="Show the totals of such a file, and run nothing.")
    json_option(parser)


def run(
    *,
    backends: Sequence[str],
    cases: int,
    variations: int,
    variation: int | None,
    long_cases: int,
    first: int | None,
    device: torch.device,
    as_arch: str | None,
    dtypes: Sequence[torch.dtype],
    inputs: str,
    jobs: int | None,
    seconds: float | None,
    record: Path | None,
    recorded: Path | None,
    as_json: bool,
) -> int:
    """Run random problems over the full contract, forward and backward, one in eight also along tangents, and compare
    them with an fp64 oracle.

    Every element of out, lse, each gradient and the caches has to be within its error bound. Ratios are errors in units
    of that bound: 1 would be at its edge. The exit code is 1 if anything fails.
    """
    if recorded is not None:
        return records.show(recorded)
    if cases + long_cases == 0:
        raise UsageError("--cases and --long are both 0: there is nothing to verify")
    if variation is not None and (variations > 1 or record is not None):
        raise UsageError("--variation repeats one problem: neither --variations nor --record go with it")
    install_arch(as_arch)
    start = first or 0
    seeds, long = range(start, start + cases), range(start, start + long_cases)
    of_seed = range(variations) if variation is None else range(variation, variation + 1)
    problems = Problems(seeds, chosen(backends), device, tuple(dtypes) or None, long=long, variations=of_seed)
    with captured_values(inputs) as path:
        problems = problems._replace(captured=path)
        if record is not None:
            problems = records.prepare(record, problems, first)
        report = examined(problems, jobs or default_jobs(), seconds, record)
    if as_json:
        print_json(as_dict(report))
    else:
        print_report(report)
        if (complete := len(report.problems.seeds)) < cases:
            print(f"{complete} of {cases} seeds are complete")
    return 0 if report.passed else 1


def examined(problems: Problems, jobs: int, seconds: float | None, record: Path | None) -> Report:
    """Examine all problems. Seeds before an interruption, or before a lost GPU, are recorded."""
    start, outcomes = time.perf_counter(), []
    done = 0
    try:
        with progress() as bar:
            task = bar.add_task("seeds", total=len(problems.numbers()))
            for batch in examine(problems, jobs, math.inf if seconds is None else seconds):
                outcomes += batch
                if any(outcome.device_lost for outcome in batch):
                    break
                done += 1
                bar.advance(task)
    finally:
        seeds, long = problems.seeds[:done], problems.long[: max(0, done - len(problems.seeds))]
        report = Report(problems._replace(seeds=seeds, long=long), outcomes, time.perf_counter() - start)
        if record is not None and seeds:
            records.append(record, records.rows_of(report))
    return report


def chosen(names: Sequence[str]) -> tuple[str, ...]:
    """The requested backends, which must be usable here; all usable ones by default."""
    known = {status.name: status for status in all_backends()}
    reasons = {name: known[name].reason if name in known else "there is no such backend" for name in names}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    if refused:
        raise BackendError(f"not to be verified here; backends: {', '.join(known)}", refused)
    return tuple(dict.fromkeys(names)) or tuple(name for name, status in known.items() if status.usable)


@contextmanager
def captured_values(inputs: str) -> Iterator[Path | None]:
    """A file of captured values for as long as problems are made; `None` for random ones."""
    if inputs == "random":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "captured.pt")
        Source(captured(batch=2, seqlen=512)).save(path)
        yield path


def repeat(problems: Problems, outcome: Outcome) -> str:
    """The command that runs one failed problem again. A problem depends on the dtypes it is drawn from."""
    words = ["flashtile", "verify", "--backend", outcome.backend]
    if problems.device.type != "cpu":
        words += ["--device", str(problems.device)]
    if problems.captured is not None:
        words += ["--inputs", "captured"]
    for drawn in problems.dtypes or ():
        words += ["--dtype", dtype_name(drawn)]
    one, none = ("--long", "--cases") if outcome.long else ("--cases", "--long")
    if outcome.variation > 0:
        words += ["--variation", str(outcome.variation)]
    return shlex.join([*words, "--seed", str(outcome.seed), one, "1", none, "0"])


def print_report(report: Report) -> None:
    failures = report.failures()
    for outcome in failures[:SHOWN_FAILURES]:
        print_failure(report.problems, outcome)
    if len(failures) > SHOWN_FAILURES:
        print(f"... and {len(failures) - SHOWN_FAILURES} more; --json has all of them\n")
    print_tallies(report.tallies())
    for backend in report.unverified():
        print(f"{backend} declined every problem: nothing is verified")
    if failures or report.passed:
        found = f"{len(failures)} of {len(report.outcomes)} runs failed" if failures else "all within their bounds"
        count = f"{report.cases()} problems and {report.cases(long=True)} long ones"
        print(f"{count} on {report.problems.device}, {report.seconds:.1f} s: {found}")
    if any(outcome.device_lost for outcome in failures):
        print("the run ended there: a process that has had such an error can use the GPU for nothing else")


def print_failure(problems: Problems, outcome: Outcome) -> None:
    print(f"FAILED {outcome.backend}: {outcome.description}")
    if outcome.error is not None:
        print(f"  {outcome.error}")
    for deviation in outcome.deviations:
        if not deviation.ok:
            print(f"  {deviation}")
    print(f"  again: {repeat(problems, outcome)}\n")


def print_tallies(tallies: list[Tally]) -> None:
    header = "backend", "dtype", "cases", "failed", "declined", "worst ratio", "of", "seed"
    words = "backend", "dtype", "of"
    rows = []
    for tally in tallies:
        worst = ("", "", "")
        if tally.worst is not None:
            variation = f" variation {tally.worst_variation}" * (tally.worst_variation > 0)
            worst = (f"{tally.worst.ratio:.3f}", tally.worst.name, f"{tally.worst_seed}{variation}")
        counts = (str(n) for n in (tally.cases, tally.failed, tally.declined))
        rows.append((tally.backend, tally.dtype, *counts, *worst))
    print(TextTable(header, rows, frozenset(i for i, name in enumerate(header) if name not in words)))


def as_dict(report: Report) -> dict[str, Any]:
    problems = report.problems
    refusals = Counter((outcome.backend, outcome.declined) for outcome in report.outcomes if outcome.declined)
    return {
        "passed": report.passed,
        "device": str(problems.device),
        "first_seed": problems.seeds.start,
        "seeds": len(problems.seeds),
        "variations": len(problems.variations),
        "cases": report.cases(),
        "long_cases": report.cases(long=True),
        "seconds": report.seconds,
        "results": [asdict(tally) for tally in report.tallies()],
        "failures": [asdict(outcome) | {"again": repeat(problems, outcome)} for outcome in report.failures()],
        "declined": [{"backend": name, "reason": reason, "cases": n} for (name, reason), n in refusals.items()],
        "unverified": report.unverified(),
    }
