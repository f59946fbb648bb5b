"""Random problems, run by backends and held against the fp64 oracle, in this process or in several."""

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .. import processes
from ..bench.captured import Source
from ..errors import BackendError
from ..testing.generate import random_case
from ..testing.long import LONGEST, long_case
from ..testing.oracle import solve
from ..testing.tolerance import Deviation, compare

# How many cases are worth a process, and how many it takes at a time. Starting one takes as long as some dozens of
# cases; on a GPU as long as a few, because kernels are compiled for most of them.
SHARES = {"cuda": (4, 1)}
SHARES_ELSEWHERE = (50, 4)
GPU_BACKENDS = ("triton", "hopper")
LONGEST_INTERPRETED = 4096


class Problems(NamedTuple):
    """Which problems are examined, by which backends."""

    seeds: range  # of random problems
    backends: tuple[str, ...]
    device: torch.device
    dtypes: tuple[torch.dtype, ...] | None  # None: all
    captured: Path | None = None  # a file of `Source`, for values that are not random
    long: range = range(0)  # seeds of long problems, which come after the others

    def numbers(self) -> list["Number"]:
        return [Number(seed) for seed in self.seeds] + [Number(seed, long=True) for seed in self.long]

    @property
    def longest(self) -> int:
        """Tokens of a long problem: fewer where a backend is interpreted, whose kernels are slow."""
        slow = self.device.type == "cpu" and any(name in GPU_BACKENDS for name in self.backends)
        return LONGEST_INTERPRETED if slow else LONGEST


class Number(NamedTuple):
    """What identifies one problem."""

    seed: int
    long: bool = False


@dataclass(frozen=True)
class Outcome:
    """What one backend made of one problem."""

    backend: str
    seed: int
    dtype: str
    description: str
    deviations: tuple[Deviation, ...] = ()  # one for each result, worst first
    error: str | None = None  # the exception, if one was raised
    declined: str | None = None  # why the backend does not take this problem
    long: bool = False

    @property
    def failed(self) -> bool:
        return self.error is not None or any(not deviation.ok for deviation in self.deviations)


@dataclass
class Tally:
    """The outcomes of one backend in one dtype so far."""

    backend: str
    dtype: str
    cases: int = 0
    failed: int = 0
    declined: int = 0
    worst: Deviation | None = None
    worst_seed: int | None = None

    def add(self, outcome: Outcome) -> None:
        if outcome.declined is not None:
            self.declined += 1
            return
        self.cases += 1
        self.failed += outcome.failed
        for deviation in outcome.deviations[:1]:
            if self.worst is None or deviation.ratio > self.worst.ratio:
                self.worst, self.worst_seed = deviation, outcome.seed


@dataclass(frozen=True)
class Report:
    """All outcomes, and what follows from them."""

    problems: Problems
    outcomes: list[Outcome]
    seconds: float

    def tallies(self) -> list[Tally]:
        """One for each backend and dtype, sorted."""
        found: dict[tuple[str, str], Tally] = {}
        for outcome in self.outcomes:
            key = outcome.backend, outcome.dtype
            found.setdefault(key, Tally(*key)).add(outcome)
        return [found[key] for key in sorted(found)]

    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]

    def unverified(self) -> list[str]:
        """Backends that declined every problem."""
        tried = {outcome.backend for outcome in self.outcomes if outcome.declined is None}
        return [backend for backend in self.problems.backends if backend not in tried]

    @property
    def passed(self) -> bool:
        return not self.failures() and not self.unverified()


def examine(problems: Problems, jobs: int) -> Generator[list[Outcome], None, None]:
    """For each problem, in order, one outcome of each backend. Who stops listening does not wait for the rest."""
    cases, at_a_time = SHARES.get(problems.device.type, SHARES_ELSEWHERE)
    numbers = problems.numbers()
    jobs = min(jobs, len(numbers) // cases)
    if jobs <= 1:
        with one_thread():
            yield from map(partial(examine_one, problems), numbers)
        return
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(jobs, context, initializer=start_worker) as pool:
        try:
            yield from pool.map(partial(examine_one, problems), numbers, chunksize=at_a_time)
        finally:
            pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    processes.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes, and the first one ends them
    torch.set_num_threads(1)


def examine_one(problems: Problems, number: Number) -> list[Outcome]:
    """One problem, solved once by the oracle and run by every backend."""
    seed, long = number
    dtypes = "any" if problems.dtypes is None else ", ".join(map(dtype_name, problems.dtypes))
    try:
        if long:
            case = long_case(seed, device=problems.device, dtypes=problems.dtypes, longest=problems.longest)
        else:
            values = None if problems.captured is None else Source.load(problems.captured)
            case = random_case(seed, device=problems.device, dtypes=problems.dtypes, values=values)
        expected = solve(case)
    except Exception as error:
        message = f"no problem to compare with: {in_words(error)}"
        described = f"long, seed {seed}" if long else f"seed {seed}"
        return [Outcome(backend, seed, dtypes, described, error=message, long=long) for backend in problems.backends]

    def outcome(backend: str) -> Outcome:
        known = partial(Outcome, backend, seed, dtype_name(case.dtype), case.description, long=long)
        try:
            return known(tuple(compare(case.run(backend), case, expected)))
        except BackendError as error:
            return known(declined=error.reasons.get(backend, str(error)))
        except Exception as error:
            return known(error=in_words(error))

    return [outcome(backend) for backend in problems.backends]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def default_jobs() -> int:
    return min(os.cpu_count() or 1, 8)


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread: for tensors as small as these, handing work to others takes longer than doing it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
