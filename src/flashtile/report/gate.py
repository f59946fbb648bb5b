"""The gate: random problems over the whole contract, each element of each result within its bound of an fp64 oracle."""

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from ..bench.captured import Source, captured
from ..bench.results import three_digits
from ..plan import backends
from ..verification import Outcome, Problems, Report, examine
from .section import Section, Table
from .settings import Settings

FEWEST = 10  # problems of each kind


def gate(settings: Settings, advance: Callable[[], None]) -> Section:
    names = tuple(status.name for status in backends() if status.usable)
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "captured.pt")
        Source(captured(2, 512)).save(path)
        for count, values in ((settings.cases, None), (settings.captured_cases, path)):
            problems, outcomes = Problems(range(count), names, settings.device, None, values), []
            start = time.perf_counter()
            with closing(examine(problems, settings.gate_jobs)) as batches:
                for batch in batches:
                    outcomes += batch
                    advance()
                    seconds = time.perf_counter() - start
                    if len(outcomes) >= FEWEST * len(names) and seconds > settings.gate_seconds:
                        break  # what is compiled for each problem takes long on some machines
            reports.append(Report(problems, outcomes, seconds))
    values = ("random", "captured")
    tallies = [(words, tally) for words, report in zip(values, reports, strict=True) for tally in report.tallies()]
    failures = [outcome for report in reports for outcome in report.failures()]
    tried = {tally.backend for _, tally in tallies if tally.cases}
    unverified = [f"{name} declined every problem: nothing is verified" for name in names if name not in tried]
    counts = [len(report.outcomes) // len(names) for report in reports]
    runs = sum(tally.cases for _, tally in tallies)
    rows = [
        (
            tally.backend,
            tally.dtype,
            words,
            str(tally.cases),
            str(tally.failed),
            str(tally.declined),
            three_digits(tally.worst.ratio) if tally.worst else "",
            tally.worst.name if tally.worst else "",
        )
        for words, tally in tallies
    ]
    found = f"{len(failures)} of {runs} runs are wrong" if failures else f"All {runs} runs are within their bounds"
    return Section(
        name="gate",
        title="Is it right?",
        summary=f"{found}: {counts[0]} random problems over every feature, forward and backward, and {counts[1]} with "
        f"captured values, each on {words_of(names)}.",
        tables=[
            Table(
                ("backend", "dtype", "values", "runs", "wrong", "declined", "worst", "of"),
                rows,
                frozenset({3, 4, 5, 6}),
                "“worst” is the largest error of any element, in units of its own bound: 1 would be at the edge.",
            )
        ],
        notes=[*map(described, failures[:20]), *unverified],
        records=[asdict(tally) | {"values": words} for words, tally in tallies],
        ok=not failures and len(unverified) < len(names),
    )


def words_of(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def described(outcome: Outcome) -> str:
    reason = outcome.error or "; ".join(str(deviation) for deviation in outcome.deviations if not deviation.ok)
    return f"Wrong: {outcome.backend}, {outcome.description}: {reason}"
