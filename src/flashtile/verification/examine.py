"""Random problems, run by backends and compared with the fp64 oracle, in this process or in several."""

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import processes
from ..as_arch import install_inherited
from ..backend.hopper.support import ARCHITECTURE as HOPPER
from ..bench.captured import Source
from ..call.device import describe_device
from ..dispatch.status import rounds_to_eight_bits
from ..errors import BackendError
from ..testing.case import Case
from ..testing.generate import random_case
from ..testing.latent import maybe_latent
from ..testing.long import LONGEST, long_case
from ..testing.moving import moving
from ..testing.oracle import solve
from ..testing.packed_rows import maybe_packed
from ..testing.threads import one_thread
from ..testing.tolerance import Deviation, compare

# Problems that pay for a process, and problems in one chunk. Starting a process takes as long as some dozens of cases;
# on a GPU as long as a few, because most of them compile kernels.
SHARES = {"cuda": (4, 1)}
SHARES_ELSEWHERE = (50, 4)
GPU_BACKENDS = ("triton", "hopper")
LONGEST_INTERPRETED = 4096
ALONG, BATCH_INVARIANT = 8, 3  # seeds, of which one is also a problem in forward mode, and another one batch-invariant
NO_PROBLEM = "no problem to compare with: "


class Problems(NamedTuple):
    """Problems to examine, and the backends that run them."""

    seeds: range  # seeds of random problems
    backends: tuple[str, ...]
    device: torch.device
    dtypes: tuple[torch.dtype, ...] | None  # None: all
    captured: Path | None = None  # a file of `Source`, for values that are not random
    long: range = range(0)  # seeds of long problems, which come after the others
    variations: range = range(1)  # variations of each random problem

    def numbers(self) -> list["Number"]:
        """The first problem of each seed, and each long one."""
        random = [Number(seed, self.variations.start) for seed in self.seeds]
        return random + [Number(seed, long=True) for seed in self.long]

    def of_seed(self, number: "Number") -> list["Number"]:
        """The variations of a seed's first problem."""
        return [number] if number.long else [number._replace(variation=n) for n in self.variations]

    @property
    def longest(self) -> int:
        """Tokens of a long problem: fewer for interpreted backends, which are slow."""
        slow = self.device.type == "cpu" and any(name in GPU_BACKENDS for name in self.backends)
        return LONGEST_INTERPRETED if slow else LONGEST


class Number(NamedTuple):
    """Identity of one problem."""

    seed: int
    variation: int = 0
    long: bool = False


@dataclass(frozen=True)
class Outcome:
    """Result of one backend for one problem."""

    backend: str
    seed: int
    dtype: str
    description: str
    deviations: tuple[Deviation, ...] = ()  # one for each result, worst first
    error: str | None = None  # the exception, if one was raised
    declined: str | None = None  # why the backend does not take this problem
    long: bool = False
    variation: int = 0
    device_lost: bool = False  # a GPU error that this process cannot recover from

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
    worst_variation: int = 0

    def add(self, outcome: Outcome) -> None:
        if outcome.declined is not None:
            self.declined += 1
            return
        self.cases += 1
        self.failed += outcome.failed
        for deviation in outcome.deviations[:1]:
            if self.worst is None or deviation.ratio > self.worst.ratio:
                self.worst, self.worst_seed, self.worst_variation = deviation, outcome.seed, outcome.variation


@dataclass(frozen=True)
class Report:
    """All outcomes and their totals."""

    problems: Problems
    outcomes: list[Outcome]
    seconds: float

    def tallies(self) -> list[Tally]:
        """Tallies by backend and dtype, sorted."""
        by_key: dict[tuple[str, str], Tally] = {}
        for outcome in self.outcomes:
            key = outcome.backend, outcome.dtype
            by_key.setdefault(key, Tally(*key)).add(outcome)
        return [by_key[key] for key in sorted(by_key)]

    def cases(self, *, long: bool = False) -> int:
        """Number of problems that were examined."""
        return len({(outcome.seed, outcome.variation) for outcome in self.outcomes if outcome.long == long})

    def failures(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]

    def unverified(self) -> list[str]:
        """Backends that declined every problem."""
        tried = {outcome.backend for outcome in self.outcomes if outcome.declined is None}
        return [backend for backend in self.problems.backends if backend not in tried]

    @property
    def passed(self) -> bool:
        return not self.failures() and not self.unverified()


def examine(problems: Problems, jobs: int, seconds: float = math.inf) -> Generator[list[Outcome], None, None]:
    """Yield the outcomes of each seed, in order: one for each backend and variation. Closing the generator cancels the
    rest.

    No seed begins after `seconds`, or after a process has lost its GPU, which is the last failure.
    """
    cases, at_a_time = SHARES.get(problems.device.type, SHARES_ELSEWHERE)
    numbers = problems.numbers()
    jobs = min(jobs, len(numbers) * len(problems.variations) // cases)
    one = partial(examine_seed, problems, time.monotonic() + seconds)
    if jobs <= 1:
        with one_thread():
            yield from until_the_end(map(one, numbers))
        return
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    with ProcessPoolExecutor(jobs, context, initializer=start_worker) as pool:
        try:
            chunk = max(1, at_a_time // len(problems.variations))
            yield from until_the_end(pool.map(one, numbers, chunksize=chunk))
        finally:
            pool.shutdown(cancel_futures=True)


def until_the_end(batches: Iterator[list[Outcome] | None]) -> Iterator[list[Outcome]]:
    """Yield batches up to the first seed without time, or with a lost GPU."""
    for outcomes in batches:
        if outcomes is None:
            return
        yield outcomes
        if any(outcome.device_lost for outcome in outcomes):
            return


def start_worker() -> None:
    processes.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent by a terminal to all processes: the parent ends them
    torch.set_num_threads(1)
    install_inherited()


def examine_seed(problems: Problems, deadline: float, first: Number) -> list[Outcome] | None:
    """Examine all variations of a seed in one process, which compiles their kernels once. `None` past the deadline.

    If every backend declines the first variation, the others are left out: the reason is nearly always one that
    variations share.
    """
    if time.monotonic() > deadline:
        return None
    outcomes: list[Outcome] = []
    for number in problems.of_seed(first):
        batch = examine_one(problems, number)
        outcomes += batch
        declined = number == first and all(outcome.declined is not None for outcome in batch)
        if declined or any(outcome.device_lost for outcome in batch):
            break
    return outcomes


def examine_one(problems: Problems, number: Number) -> list[Outcome]:
    """Run one problem with every backend, and solve it once if any of them takes it."""
    seed, variation, long = number
    try:
        case = case_of(problems, number)
    except Exception as error:
        dtypes = "any" if problems.dtypes is None else ", ".join(map(dtype_name, problems.dtypes))
        described = f"long, seed {seed}" if long else f"seed {seed}" + f" variation {variation}" * (variation > 0)
        known = [Outcome(name, seed, dtypes, described, long=long, variation=variation) for name in problems.backends]
        return [failed(outcome, problems, error, NO_PROBLEM) for outcome in known]

    along = moving(case, names_that_move(number)) if has_forward_mode(case, number) else None
    outcomes, results = {}, {}
    for name in problems.backends:
        outcome = Outcome(name, seed, dtype_name(case.dtype), case.description, long=long, variation=variation)
        outcomes[name] = outcome
        try:
            results[name] = on_host(results_of(case, name, number))
            if along is not None:
                results[name] |= on_host(tangents_alone(along.run(name)))
        except BackendError as error:
            outcomes[name] = replace(outcome, declined=error.reasons.get(name, str(error)))
        except Exception as error:
            outcomes[name] = failed(outcome, problems, error)
            if outcomes[name].device_lost:
                return [outcomes[name]]
    if results:
        known = {name: outcomes[name] for name in results}
        outcomes |= compared(problems, case, along, known, results)
    return list(outcomes.values())


def results_of(case: Case, backend: str, number: Number) -> dict[str, Tensor]:
    """The results of a problem. One in eight is batch-invariant, which has other plans, where a backend takes that."""
    if number.seed % ALONG == BATCH_INVARIANT:
        with contextlib.suppress(BackendError):
            return case.run(backend, batch_invariant=True)
    return case.run(backend)


def has_forward_mode(case: Case, number: Number) -> bool:
    """Whether a problem is solved in forward mode too: one in eight, because it has kernels of its own. Caches and keys
    of 8 bits have no derivatives.
    """
    if number.seed % ALONG != 0 or number.long or case.function == "attention_with_kvcache":
        return False
    return case.arguments["k"].dtype == case.dtype


def names_that_move(number: Number) -> tuple[str, ...] | None:
    """q, k and v in every second problem, which kernels take that have no tangents of other inputs; else all."""
    return ("q", "k", "v") if number.seed // ALONG % 2 else None


def tangents_alone(results: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in results.items() if name in ("tout", "tlse")}


def compared(
    problems: Problems,
    case: Case,
    along: Case | None,
    outcomes: dict[str, Outcome],
    results: dict[str, dict[str, Tensor]],
) -> dict[str, Outcome]:
    """The outcomes of the backends that have `results`; `along` is the case in forward mode."""
    try:
        expected = solve(case)
        if along is not None:
            expected |= tangents_alone(solve(along))
    except Exception as error:
        return {name: failed(outcome, problems, error, NO_PROBLEM) for name, outcome in outcomes.items()}
    judged = {}
    for name, outcome in outcomes.items():
        try:
            rounds = rounds_to_eight_bits(name)
            deviations = compare(results[name], case, expected, rounds_to_eight_bits=rounds)
            judged[name] = replace(outcome, deviations=tuple(deviations))
        except Exception as error:
            judged[name] = failed(outcome, problems, error)
    return judged


def case_of(problems: Problems, number: Number) -> Case:
    seed, variation, long = number
    device, dtypes = problems.device, problems.dtypes
    if long:
        return long_case(seed, device=device, dtypes=dtypes, longest=problems.longest)
    values = None if problems.captured is None else Source.load(problems.captured)
    on_hopper = is_hopper(device)
    case = random_case(seed, device=device, dtypes=dtypes, values=values, variation=variation, on_hopper=on_hopper)
    return maybe_packed(maybe_latent(case))


def is_hopper(device: torch.device) -> bool:
    return describe_device(device).arch == HOPPER


def on_host(results: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results on the CPU. Asynchronous errors of kernels are raised here at the latest."""
    return {name: x.cpu() for name, x in results.items()}


def failed(outcome: Outcome, problems: Problems, error: Exception, words: str = "") -> Outcome:
    return replace(outcome, error=words + in_words(error), device_lost=is_lost(problems.device))


def is_lost(device: torch.device) -> bool:
    """Whether an error such as an illegal memory access has ended this process's use of the GPU: every later call
    repeats it.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def default_jobs() -> int:
    return min(os.cpu_count() or 1, 8)
