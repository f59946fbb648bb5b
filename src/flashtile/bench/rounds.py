"""Interleaving: each round times every entrant once, after the same rest; the order rotates from round to round.

Clock rates, heat and other load then affect all entrants equally, and the ratio of two entrants within one round is
steadier than either figure.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from .clocks import Clock, Run
from .sweep import Timing

FEWEST_ROUNDS = 3
MOST_CALLS = 200  # in one sample: a GPU's queue holds about a thousand kernels
HOPELESS = 4  # times the fastest: one round is enough, where a call is long
LONG_SECONDS = 0.1  # least time of such a call


@dataclass
class Entrant:
    """One provider's run and its times. `failure` is the reason if it was dropped."""

    name: str
    run: Run
    calls_in_run: int = 1  # calls of the provider that one `run` does
    calls: int = 1  # runs in one sample
    once: float = 0.0  # seconds of one run, from `calibrate`
    call: Run | None = None  # one call, where `run` is a graph of several
    eager: bool = False  # host and device together are timed, instead of the device
    seconds: list[float] = field(default_factory=list)  # one call of the provider, for each round
    failure: str | None = None

    @property
    def seconds_of_call(self) -> float:
        return self.once / self.calls_in_run


def calibrate(clock: Clock, entrant: Entrant, sample_seconds: float) -> None:
    """Set how many runs make a sample of `sample_seconds`; also compiles and allocates before the first round."""
    once = timed(clock, entrant, 1)
    if once < sample_seconds / 4:
        once = timed(clock, entrant, 3)
    entrant.once = once
    entrant.calls = max(1, min(MOST_CALLS, math.ceil(sample_seconds / max(once, 1e-9))))


def timed(clock: Clock, entrant: Entrant, calls: int) -> float:
    return (clock.eager_seconds if entrant.eager else clock.seconds)(entrant.run, calls)


def interleave(clock: Clock, entrants: Sequence[Entrant], timing: Timing, failed: Callable[[Exception], str]) -> None:
    """Time every entrant in every round. One that raises is dropped, with the reason from `failed`. One whose calls are
    long, and far behind the fastest, has one round.
    """
    for entrant in entrants:
        if entrant.failure is None:
            clock.rest(timing.rest_seconds)
            try:
                calibrate(clock, entrant, timing.sample_seconds)
            except Exception as error:
                entrant.failure = failed(error)
    fastest = min((entrant.seconds_of_call for entrant in entrants if entrant.failure is None), default=0.0)
    start = time.perf_counter()
    for turn in range(timing.rounds):
        if turn >= FEWEST_ROUNDS and timing.most_seconds and time.perf_counter() - start > timing.most_seconds:
            break
        first = turn % max(len(entrants), 1)
        for entrant in (*entrants[first:], *entrants[:first]):
            hopeless = entrant.seconds_of_call > max(LONG_SECONDS, HOPELESS * fastest)
            if entrant.failure is not None or (turn > 0 and hopeless):
                continue
            clock.rest(timing.rest_seconds)
            try:
                seconds = timed(clock, entrant, entrant.calls)
            except Exception as error:
                entrant.failure = failed(error)
                continue
            entrant.seconds.append(seconds / entrant.calls_in_run)


class Band(NamedTuple):
    """A median with its 20% and 80% quantiles."""

    median: float
    low: float
    high: float

    def map(self, change: Callable[[float], float]) -> "Band":
        """The band under a monotone change; a falling one swaps the ends."""
        ends = change(self.low), change(self.high)
        return Band(change(self.median), min(ends), max(ends))


def band(samples: Sequence[float]) -> Band:
    quantiles = torch.tensor(samples, dtype=torch.float64).quantile(torch.tensor([0.5, 0.2, 0.8], dtype=torch.float64))
    return Band(*quantiles.tolist())


def ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Speed in units of the reference's, round by round: above 1 is faster."""
    return [theirs / own for own, theirs in zip(seconds, reference, strict=False)]
