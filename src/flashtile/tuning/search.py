"""A local search from the shipped tile to faster ones. A `Trial` checks and times tiles."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..backend.triton.tile_config import KernelConfig
from ..backend.triton.tuned import BLOCKS, STAGES, WARPS

LEAST_GAIN = 0.01  # part of the time: with less, two tiles count as equally fast


class Trial(Protocol):
    """One kernel on one device."""

    def refuses(self, launch: KernelConfig) -> str | None:
        """Reason to refuse a tile: it does not compile, does not fit, or is wrong; `None` if it is valid."""
        ...

    def seconds(self, launches: Sequence[KernelConfig]) -> list[float]:
        """Median of each tile, timed in interleaved rounds: comparable only with one another."""
        ...


class TuningError(RuntimeError):
    """The search could not be made."""


@dataclass
class Tried:
    """A tile that was tried, and its result."""

    launch: KernelConfig
    against: KernelConfig | None = None  # the best one so far
    gain: float | None = None  # of time against it: 0.1 is a tenth less
    refused: str | None = None


@dataclass
class SearchResult:
    """The best tile; `gain` is the saved part of the shipped tile's time, measured once more at the end."""

    shipped: KernelConfig
    best: KernelConfig
    gain: float = 0.0
    seconds: tuple[float, float] = (0.0, 0.0)  # of the shipped one and of the best
    finished: bool = True  # all neighbors of the best one were tried
    tried: list[Tried] = field(default_factory=list)


def search(
    shipped: KernelConfig, trial: Trial, seconds: float, clock: Callable[[], float] = time.monotonic
) -> SearchResult:
    """Go to a faster neighbor while there is one and time is left.

    Raises:
        TuningError: the shipped tile itself is refused, so this machine cannot be tuned.
    """
    end = clock() + seconds
    if (reason := trial.refuses(shipped)) is not None:
        raise TuningError(f"the shipped tile {shipped} is refused: {reason}")
    result = SearchResult(shipped, shipped)
    known = {shipped}
    while (candidate := next((x for x in neighbors(result.best) if x not in known), None)) is not None:
        if clock() >= end:
            result.finished = False
            break
        known.add(candidate)
        tried = Tried(candidate, refused=trial.refuses(candidate))
        result.tried.append(tried)
        if tried.refused is None:
            best, theirs = trial.seconds((result.best, candidate))
            tried.against, tried.gain = result.best, 1 - theirs / best
            if tried.gain >= LEAST_GAIN:
                result.best = candidate
    if result.best != shipped:
        before, after = trial.seconds((shipped, result.best))
        result.seconds = (before, after)
        result.gain = 1 - after / before
        if result.gain < LEAST_GAIN:  # the sum of lucky steps
            result.best, result.gain = shipped, 0.0
    return result


def neighbors(launch: KernelConfig) -> Iterator[KernelConfig]:
    """Tiles that differ in one number, or in two that belong together: rows and keys, or rows and warps."""
    m, n, warps, stages = launch[:4]
    shapes = [
        (m, n, warps, stages - 1), (m, n, warps, stages + 1), (m, n, warps // 2, stages), (m, n, warps * 2, stages),
        (m, n // 2, warps, stages), (m, n * 2, warps, stages), (m // 2, n, warps, stages), (m * 2, n, warps, stages),
        (m // 2, n, warps // 2, stages), (m * 2, n, warps * 2, stages),
        (m // 2, n * 2, warps, stages), (m * 2, n // 2, warps, stages),
    ]  # fmt: skip
    for block_m, block_n, w, s in shapes:
        if block_m in BLOCKS and block_n in BLOCKS and w in WARPS and s in STAGES:
            yield KernelConfig(block_m, block_n, w, s, precision=launch.precision)
