"""Runs of sweeps, cell by cell: inputs, check, rounds. A failure becomes a row with its reason."""

import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from ..errors import AttentionWarning
from ..testing.case import Case
from .cell import FIRST_CALLS, TIMED, Cell
from .check import Checker
from .clocks import Clock, clock_of
from .fresh import Job, samples
from .inputs import make_case
from .providers import Declined, Prepared, Provider
from .results import DECLINED, FAILED, WRONG, Row
from .rounds import Entrant, interleave, ratios
from .sweep import Sweep, Timing

READ_CACHES = 3  # bytes that decoding reads in one sample, in sizes of the last level of cache
MOST_COPIES = 64
HOST_CALLS = 5


class Bench:
    """Providers on a device; `rows(cell)` measures one cell."""

    def __init__(
        self,
        device: torch.device,
        providers: list[Provider],
        timing: Timing,
        reference: str | None,
        library: Path | None,
    ) -> None:
        self.device, self.providers, self.timing, self.reference = device, providers, timing, reference
        self.library = library
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
        checker, entrants = Checker(case), []
        for provider, row in zip(self.providers, rows, strict=True):
            entrant = self.admitted(provider, row, case, checker)
            if entrant is not None:
                entrants.append((row, entrant))
        interleave(self.clock, [entrant for _, entrant in entrants], self.timing, self.in_words)
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
            row.host_seconds = self.clock.host_seconds(lambda: backward(dout), HOST_CALLS)
            return Entrant(row.provider, lambda: backward(dout))
        row.host_seconds = self.clock.host_seconds(prepared.forward, HOST_CALLS)
        if row.cell.measure == "forward":
            return Entrant(row.provider, prepared.forward)
        copies = self.copies(row.cell)
        cases = [make_case(row.cell, self.device, seed) for seed in range(1, copies)]
        runs = [prepared.forward, *(provider.prepare(other, decode=True).forward for other in cases)]
        row.timing += f", {copies} caches in turn" + (", CUDA graph" if self.device.type == "cuda" else "")
        return Entrant(row.provider, self.clock.replayable(runs), calls_in_run=copies)

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
