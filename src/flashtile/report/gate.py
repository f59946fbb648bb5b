"""The gate: problems of several kinds, each element of each result within its bound of an oracle."""

import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from ..bench.captured import Source, captured
from ..bench.results import three_digits
from ..dispatch.status import backends
from ..verification.examine import Outcome, Problems, Report, Tally, examine
from .section import Section, Table
from .settings import Settings

FEWEST = 10  # problems of each kind


@dataclass(frozen=True)
class Kind:
    """Outcomes of one kind of problem. A further kind is one more of these for `section_of`."""

    name: str  # in tables
    words: str  # after the number of problems: "random problems over every feature"
    report: Report

    @property
    def requested(self) -> int:
        """Problems; time may run out before some of them."""
        problems = self.report.problems
        return len(problems.seeds) * len(problems.variations) + len(problems.long)

    @property
    def examined(self) -> int:
        return len(self.report.outcomes) // len(self.report.problems.backends)

    def __str__(self) -> str:
        if self.examined == self.requested:
            return f"{self.examined:,} {self.words}"
        return f"{self.examined:,} of {self.requested:,} {self.words} (then the time was up)"


def gate(settings: Settings, advance: Callable[[], None]) -> Section:
    names = tuple(status.name for status in backends() if status.usable)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "captured.pt")
        Source(captured(2, 512)).save(path)
        random, real = (
            Problems(range(-(-cases // varied)), names, settings.device, None, values, variations=range(varied))
            for cases, values in ((settings.cases, None), (settings.captured_cases, path))
            for varied in (min(settings.variations, cases),)
        )
        long = Problems(range(0), names, settings.device, None, None, long=range(settings.long_cases))
        kinds = [
            Kind("random", "random problems over every feature", examined(settings, random, advance)),
            Kind("captured", "with captured values", examined(settings, real, advance)),
            Kind("long", "of up to 2**20 keys or rows", examined(settings, long, advance)),
        ]
    return section_of(kinds)


def examined(settings: Settings, problems: Problems, advance: Callable[[], None]) -> Report:
    """Examine problems in order until the time is up: compiling their kernels takes long on some machines."""
    outcomes, start = [], time.perf_counter()
    with closing(examine(problems, settings.gate_jobs)) as batches:
        for batch in batches:
            outcomes += batch
            for _ in range(len(batch) // len(problems.backends)):
                advance()
            seconds = time.perf_counter() - start
            if len(outcomes) >= FEWEST * len(problems.backends) and seconds > settings.gate_seconds:
                break
    return Report(problems, outcomes, time.perf_counter() - start)


def section_of(kinds: list[Kind]) -> Section:
    names = kinds[0].report.problems.backends
    tallies = [(kind.name, tally) for kind in kinds for tally in kind.report.tallies()]
    failures = [outcome for kind in kinds for outcome in kind.report.failures()]
    tried = {tally.backend for _, tally in tallies if tally.cases}
    unverified = [f"{name} declined every problem: nothing is verified" for name in names if name not in tried]
    runs = sum(tally.cases for _, tally in tallies)
    verdict = (
        f"{len(failures)} of {runs:,} runs are wrong" if failures else f"All {runs:,} runs are within their bounds"
    )
    details = [(tally.backend, tally.dtype, words, *entries([tally])) for words, tally in tallies]
    columns = ("backend", "dtype", "values", "runs", "wrong", "declined", "worst", "of")
    return Section(
        name="gate",
        title="Is it right?",
        summary=f"{verdict}: {in_list(tuple(map(str, kinds)))}, forward and backward, each on {in_list(names)}.",
        tables=[
            Table(
                ("backend", *columns[3:]),
                [(name, *entries([tally for _, tally in tallies if tally.backend == name])) for name in names],
                frozenset({1, 2, 3, 4}),
                "“worst” is the largest error of any element, in units of its own bound: 1 would be at the edge.",
            ),
            Table(columns, details, frozenset({3, 4, 5, 6}), folded="By backend, dtype and kind of values"),
        ],
        notes=[*map(described, failures[:20]), *unverified],
        records=[asdict(tally) | {"values": words} for words, tally in tallies],
        ok=not failures and len(unverified) < len(names),
    )


def entries(tallies: list[Tally]) -> tuple[str, ...]:
    """Runs, wrong, declined, the worst error and its result."""
    worst = max((x.worst for x in tallies if x.worst), key=lambda deviation: deviation.ratio, default=None)
    counts = (sum(x.cases for x in tallies), sum(x.failed for x in tallies), sum(x.declined for x in tallies))
    return (*(f"{n:,}" for n in counts), three_digits(worst.ratio) if worst else "", worst.name if worst else "")


def in_list(names: tuple[str, ...]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def described(outcome: Outcome) -> str:
    reason = outcome.error or "; ".join(str(deviation) for deviation in outcome.deviations if not deviation.ok)
    return f"Wrong: {outcome.backend}, {outcome.description}: {reason}"
