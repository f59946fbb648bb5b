"""The rounds of a soak: threads that call, then a sample of memory while nothing runs."""

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from . import exhaustion
from .calls import Caller, Problems
from .ledger import Ledger
from .memory import Growth, growth, sample

ROUND_SECONDS, FEWEST_ROUNDS = 10.0, 30
EXHAUSTED_EVERY = 6  # rounds, on a GPU


@dataclass
class Soak:
    """A soak of `threads` that call for `minutes`, first each problem once. Results are in `ledger` and `samples`."""

    problems: Problems
    minutes: float
    threads: int
    seed: int
    ledger: Ledger = field(default_factory=Ledger)
    samples: list[dict[str, int]] = field(default_factory=list)  # after the first pass over all problems
    warm_seconds: float = 0.0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        device = self.problems.device
        self.streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(self.threads)]

    def run(self, tell: Callable[[str], None]) -> None:
        """Run all rounds; `tell` gets a line after each."""
        begun = time.perf_counter()
        deadline = begun + 60 * self.minutes
        try:
            self.warm_up(deadline)
            self.warm_seconds = time.perf_counter() - begun
            tell(f"all problems once: {self.warm_seconds:.0f} s")
            length = min(ROUND_SECONDS, (deadline - time.perf_counter()) / FEWEST_ROUNDS)
            for number in itertools.count():
                if time.perf_counter() >= deadline or self.ledger.hopeless:
                    break
                self.round(min(deadline, time.perf_counter() + length), number)
                self.samples.append(sample(self.problems.device))
                tell(self.line(time.perf_counter() - begun))
        finally:
            self.seconds = time.perf_counter() - begun

    def warm_up(self, deadline: float) -> None:
        """Run every problem in every way, so that later compiling and caching does not look like a leak."""
        kinds, backends = self.problems.kinds, self.problems.backends
        work = [(kind, seed, backend) for seed in self.problems.seeds for backend in backends for kind in kinds]
        left, lock = iter(work), threading.Lock()

        def one(caller: Caller) -> bool:
            with lock:
                entry = next(left, None)
            if entry is not None:
                caller.call_of(*entry)
            return entry is not None

        self.together(one, deadline, "warm")
        self.exhaust(0)

    def round(self, deadline: float, number: int) -> None:
        """Run one round in new threads: memory of a thread has to be freed with it."""

        def one(caller: Caller) -> bool:
            caller.call()
            return True

        self.together(one, deadline, number)
        if number % EXHAUSTED_EVERY == EXHAUSTED_EVERY - 1:
            self.exhaust(number)

    def together(self, one: Callable[[Caller], bool], deadline: float, number: object) -> None:
        """Repeat `one` in every thread until it returns False or the deadline is reached."""
        stop = threading.Event()

        def repeat(thread: int) -> None:
            caller = Caller(self.problems, self.ledger, random.Random(f"{self.seed} {number} {thread}"))
            with on_stream(self.streams[thread]):
                while time.perf_counter() < deadline and not stop.is_set() and not self.ledger.hopeless:
                    if not one(caller):
                        break

        threads = [threading.Thread(target=repeat, args=(n,), daemon=True) for n in range(self.threads)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # also if a signal ends the soak: no thread may call while the interpreter shuts down
            stop.set()
            for thread in threads:
                thread.join()

    def exhaust(self, number: int) -> None:
        if self.problems.device.type != "cuda":
            return
        try:
            failures, wrong = exhaustion.exhaust(self.problems.device, number)
        except Exception as error:
            failures, wrong = 0, [f"{type(error).__name__}: {error}"]
        with self.ledger.lock:
            self.ledger.counts["out of memory"] += failures
        for words in wrong:
            self.ledger.fail("out of memory", f"turn {number}", words)

    # Results ---------------------------------------------------------------------------------------------------------

    @property
    def growth(self) -> dict[str, Growth]:
        return growth(self.samples)

    @property
    def passed(self) -> bool:
        """Whether calls ran, none failed, and enough samples show that memory does not grow."""
        grown, counts = self.growth, self.ledger.counts
        return counts["plain"] > 0 and counts["failed"] == 0 and bool(grown) and all(x.ok for x in grown.values())

    def line(self, seconds: float) -> str:
        calls = sum(self.ledger.counts.values())
        memory = ", ".join(f"{name} {x / 2**20:,.0f} MiB" for name, x in self.samples[-1].items())
        failed = self.ledger.counts["failed"]
        return f"{seconds / 60:.1f} of {self.minutes:g} min: {calls:,} calls, {failed} failed; {memory}"

    def as_dict(self) -> dict[str, Any]:
        grown = {
            name: {"middle": x.middle, "last": x.last, "limit": x.limit, "ok": x.ok} for name, x in self.growth.items()
        }
        about = {"device": str(self.problems.device), "backends": self.problems.backends, "threads": self.threads}
        about |= {"first_seed": self.problems.seeds.start, "problems": len(self.problems.seeds), "seed": self.seed}
        times = {"seconds": self.seconds, "warm_seconds": self.warm_seconds}
        failures = [asdict(failure) for failure in self.ledger.failures]
        outcome = {"passed": self.passed, "calls": dict(self.ledger.counts), "memory": grown, "failures": failures}
        return about | times | outcome | {"samples": self.samples}


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield
    stream.synchronize()
