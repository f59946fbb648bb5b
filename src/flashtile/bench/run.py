"""Runs of sweeps, cell by cell: inputs, check, rounds. A failure becomes a row with its reason."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ..errors import AttentionWarning
from ..testing.case import Case
from .cell import FIRST_CALLS, TIMED, Cell
from .check import Checker
from .clocks import Clock, Run, clock_of
from .fresh import Job, samples
from .inputs import make_case
from .providers import Declined, Prepared, Provider
from .results import DECLINED, FAILED, WRONG, Row
from .rounds import Entrant, calibrate, interleave, ratios
from .sweep import Sweep, Timing

READ_CACHES = 3  # bytes that decoding reads in one sample, in sizes of the last level of cache
MOST_COPIES = 64
HOST_CALLS = 5
GRAPH_CALLS = 20  # in a CUDA graph of a short call
MOST_HOST_SECONDS = 0.02  # most time of a call that is timed on the host more than once
PREPARATION, ROUNDS = "preparation", "rounds"  # steps of a cell that are no provider's


class Bench:
    """Providers on a device; `rows(cell)` measures one cell.

    `absent` has reasons why a provider is not asked for a cell. `begin(cell, step)` is called before each step: the
    name of a provider, `PREPARATION` or `ROUNDS`.
    """

    def __init__(
        self,
        device: torch.device,
        providers: list[Provider],
        timing: Timing,
        reference: str | None,
        library: Path | None,
        absent: Mapping[tuple[Cell, str], str] | None = None,
        begin: Callable[[Cell, str], None] = lambda cell, step: None,
        specialists: Sequence[str] = (),
    ) -> None:
        self.device, self.providers, self.timing, self.reference = device, providers, timing, reference
        self.library, self.absent, self.begin, self.specialists = library, absent or {}, begin, specialists
        self.clock: Clock = clock_of(device)
        self.lost: str | None = None  # why nothing more runs on this device, in this process

    def run(self, sweep: Sweep, done: Callable[[Cell], None]) -> Iterator[Row]:
        """All rows; `done` is called after each cell."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AttentionWarning)  # a row names its backend
            for cell in sweep.cells:
                yield from self.rows(cell)
                done(cell)

    def rows(self, cell: Cell) -> list[Row]:
        rows = [Row(cell, provider.name) for provider in self.providers]
        if cell.measure not in TIMED:
            for row in rows:
                self.measure_fresh(row)
            return rows
        self.begin(cell, PREPARATION)
        try:
            case = make_case(cell, self.device)
        except Exception as error:
            for row in rows:
                row.status, row.reason = FAILED, f"no inputs: {self.in_words(error)}"
            return rows
        self.measure_timed(case, rows)
        return rows

    # In this process -------------------------------------------------------------------------------------------------

    def measure_timed(self, case: Case, rows: list[Row]) -> None:
        checker, entrants, start = Checker(case), [], time.perf_counter()
        limit = self.timing.cell_seconds
        for provider, row in zip(self.providers, rows, strict=True):
            if limit is not None and time.perf_counter() - start > limit:
                row.status, row.reason = FAILED, f"not measured: the {limit:g} s of this cell's preparation were up"
                continue
            if row.provider in self.specialists and not row.cell.is_special:
                row.status, row.reason = DECLINED, "not asked: the cell has no scores or masks of its own"
                continue
            if (row.cell, row.provider) in self.absent:
                row.status, row.reason = FAILED, self.absent[row.cell, row.provider]
                continue
            self.begin(row.cell, provider.name)
            entrant = self.admitted(provider, row, case, checker)
            if entrant is not None:
                entrants.append((row, entrant))
        if not entrants:
            return
        self.begin(entrants[0][0].cell, ROUNDS)
        eager = self.eager_entrants(entrants)
        interleave(self.clock, [e for _, e in entrants] + [e for _, e in eager], self.timing, self.in_words)
        for row, entrant in eager:
            row.eager = [] if entrant.failure else entrant.seconds
        clocks = self.clock.state()
        reference = next((e.seconds for row, e in entrants if row.provider == self.reference and not e.failure), [])
        for row, entrant in entrants:
            if entrant.failure is not None:
                row.status, row.reason = FAILED, entrant.failure
                continue
            row.samples, row.ratios = entrant.seconds, ratios(entrant.seconds, reference)
            row.calls, row.clocks = entrant.calls * entrant.calls_in_run, clocks

    def admitted(self, provider: Provider, row: Row, case: Case, checker: Checker) -> Entrant | None:
        """Prepare and check the provider; `None` with the reason in the row if it cannot be timed."""
        decode = row.cell.measure == "decode"
        try:
            reason = self.lost or provider.unusable(self.device)
            if reason is not None:
                raise Declined(reason)
            prepared = provider.prepare(case, decode)
            verdict = checker.verdict(provider, prepared, decode)
            row.detail, row.checked, row.error_ratio = prepared.detail, verdict.what, verdict.ratio
            if not verdict.ok:
                row.status, row.reason = WRONG, verdict.reason
                return None
            return self.entrant(provider, row, case, prepared)
        except Declined as reason:
            row.status, row.reason = DECLINED, str(reason)
        except Exception as error:
            row.status, row.reason = FAILED, self.in_words(error)
        return None

    def entrant(self, provider: Provider, row: Row, case: Case, prepared: Prepared) -> Entrant:
        row.timing = self.clock.kind
        if row.cell.measure == "backward":
            backward, dout = prepared.backward, case.dout
            if backward is None or dout is None:
                raise Declined("no backward")
            row.host_seconds = self.host_seconds(lambda: backward(dout))
            return Entrant(row.provider, lambda: backward(dout))
        row.host_seconds = self.host_seconds(prepared.forward)
        if row.cell.measure == "forward":
            return Entrant(row.provider, prepared.forward)
        copies = self.copies(row.cell)
        cases = [make_case(row.cell, self.device, seed) for seed in range(1, copies)]
        runs = [prepared.forward, *(provider.prepare(other, decode=True).forward for other in cases)]
        row.timing += f", {copies} caches in turn" + (", CUDA graph" if self.device.type == "cuda" else "")
        return Entrant(row.provider, self.clock.replayable(runs), calls_in_run=copies, call=prepared.forward)

    def host_seconds(self, run: Run) -> float | None:
        once = self.clock.host_seconds(run, 1)
        return once if once is None or once > MOST_HOST_SECONDS else self.clock.host_seconds(run, HOST_CALLS)

    def eager_entrants(self, entrants: list[tuple[Row, Entrant]]) -> list[tuple[Row, Entrant]]:
        """Entrants for the eager time of a short cell; none for other cells, and where the clock has no graphs. The
        given entrants of a short cell become CUDA graphs.
        """
        short = self.timing.short_seconds
        if short is None or not self.clock.graphs:
            return []
        seconds = []
        for _, entrant in entrants:
            try:
                calibrate(self.clock, entrant, self.timing.sample_seconds)
                seconds.append(entrant.seconds_of_call)
            except Exception as error:
                entrant.failure = self.in_words(error)
        if min(seconds, default=short) >= short:
            return []
        eager = []
        for row, entrant in entrants:
            if entrant.failure is None:
                eager.append((row, Entrant(row.provider, entrant.call or entrant.run, eager=True)))
                self.capture(row, entrant)
        return eager

    def capture(self, row: Row, entrant: Entrant) -> None:
        """Replace the entrant's run by a CUDA graph of several calls. A call that cannot be captured stays eager, which
        its row says.
        """
        if row.cell.measure == "decode":
            return  # it is a graph already
        try:
            entrant.run = self.clock.replayable([entrant.run] * GRAPH_CALLS)
            entrant.calls_in_run = GRAPH_CALLS
            row.timing = f"{self.clock.kind}, CUDA graph of {GRAPH_CALLS} calls"
        except Exception as error:
            row.timing = f"{self.clock.kind}; no CUDA graph: {self.in_words(error)}"

    def copies(self, cell: Cell) -> int:
        """Number of KV caches that are read one after another, so that none is still in the device's own cache."""
        return max(1, min(MOST_COPIES, -(-READ_CACHES * self.clock.cache_bytes // cell.kv_bytes)))

    # In processes of their own ---------------------------------------------------------------------------------------

    def measure_fresh(self, row: Row) -> None:
        library = str(self.library) if self.library else None
        job = Job((row.cell,), row.provider, str(self.device), library)
        row.timing = "fresh process" + (", wall clock" if row.cell.measure in FIRST_CALLS else "")
        runs = self.timing.fresh_runs if row.cell.measure in FIRST_CALLS else 1  # allocators count exactly
        for finding in samples(job, runs):
            if "value" not in finding:
                row.status = DECLINED if "declined" in finding else FAILED
                row.reason = finding.get("declined") or finding.get("error", "")
                row.samples = []
                return
            row.samples.append(finding["value"])
            row.resident_bytes = finding.get("resident_bytes")

    def in_words(self, error: Exception) -> str:
        """An exception in one line. On a GPU, also record whether the exception has lost its context."""
        line = next(iter(str(error).strip().splitlines()), "")
        summary = f"{type(error).__name__}: {line}"
        if self.device.type == "cuda" and self.lost is None:
            try:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
            except Exception:
                self.lost = f"the device's context was lost earlier, by {summary}"
        return summary


def stamp() -> str:
    """Date and time with its zone, for records."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
