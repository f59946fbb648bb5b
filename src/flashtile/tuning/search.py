"""From the shipped tile to a faster one, one step at a time. What a tile takes is asked of a `Trial`."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..backend.triton.configs import KernelConfig
from ..backend.triton.tuned import BLOCKS, STAGES, WARPS

LEAST_GAIN = 0.01  # of the time: below it, two tiles count as equally fast


class Trial(Protocol):
    """One kernel on one device."""

    def refuses(self, launch: KernelConfig) -> str | None:
        """Why a tile is none: it does not compile, does not fit, or computes something wrong; `None` if it is one."""
        ...

    def seconds(self, launches: Sequence[KernelConfig]) -> list[float]:
        """Of each tile, timed in turns: medians, to be compared with one another alone."""
        ...


class TuningError(RuntimeError):
    """The search could not be made."""


@dataclass
class Tried:
    """A tile that was tried, and what became of it."""

    launch: KernelConfig
    against: KernelConfig | None = None  # the best one until then
    gain: float | None = None  # of time against it: 0.1 is a tenth less
    refused: str | None = None


@dataclass
class Found:
    """The best tile; `gain` is of time against the shipped one, measured once more at the end."""

    shipped: KernelConfig
    best: KernelConfig
    gain: float = 0.0
    seconds: tuple[float, float] = (0.0, 0.0)  # of the shipped one and of the best
    finished: bool = True  # no neighbour of the best one is left
    tried: list[Tried] = field(default_factory=list)


def search(shipped: KernelConfig, trial: Trial, seconds: float, clock: Callable[[], float] = time.monotonic) -> Found:
    """Go to a faster neighbour as long as there is one and time is left.

    Raises:
        TuningError: the shipped tile itself is refused; nothing can be learned from a machine on which it is.
    """
    end = clock() + seconds
    if (reason := trial.refuses(shipped)) is not None:
        raise TuningError(f"the shipped tile {shipped} is refused: {reason}")
    found = Found(shipped, shipped)
    known = {shipped}
    while (candidate := next((x for x in neighbours(found.best) if x not in known), None)) is not None:
        if clock() >= end:
            found.finished = False
            break
        known.add(candidate)
        tried = Tried(candidate, refused=trial.refuses(candidate))
        found.tried.append(tried)
        if tried.refused is None:
            best, theirs = trial.seconds((found.best, candidate))
            tried.against, tried.gain = found.best, 1 - theirs / best
            if tried.gain >= LEAST_GAIN:
                found.best = candidate
    if found.best != shipped:
        before, after = trial.seconds((shipped, found.best))
        found.seconds = (before, after)
        found.gain = 1 - after / before
        if found.gain < LEAST_GAIN:  # steps that were each a little lucky
            found.best, found.gain = shipped, 0.0
    return found


def neighbours(launch: KernelConfig) -> Iterator[KernelConfig]:
    """Tiles that differ in one number; or in two that go together, a tile's shape, or its rows and their warps."""
    m, n, warps, stages = launch[:4]
    shapes = [
        (m, n, warps, stages - 1), (m, n, warps, stages + 1), (m, n, warps // 2, stages), (m, n, warps * 2, stages),
        (m, n // 2, warps, stages), (m, n * 2, warps, stages), (m // 2, n, warps, stages), (m * 2, n, warps, stages),
        (m // 2, n, warps // 2, stages), (m * 2, n, warps * 2, stages),
        (m // 2, n * 2, warps, stages), (m * 2, n // 2, warps, stages),
    ]  # fmt: skip
    for block_m, block_n, w, s in shapes:
        if block_m in BLOCKS and block_n in BLOCKS and w in WARPS and s in STAGES:
            yield KernelConfig(block_m, block_n, w, s)
