"""The interface between a device's clock and the rest of the benchmark."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Run = Callable[[], Any]


class Clock(Protocol):
    """Interface between a device and the rest of the benchmark."""

    kind: str  # how `seconds` are measured, in words
    graphs: bool  # whether `replayable` leaves out the host's time

    @property
    def cache_bytes(self) -> int:
        """Size of the last level of cache. Inputs that are to be read from memory must be several times larger."""
        ...

    def rest(self, seconds: float) -> None:
        """Let the device come to rest before a sample, for `seconds` at least."""
        ...

    def seconds(self, run: Run, calls: int) -> float:
        """Seconds of one call: the mean of `calls` back to back, without the host's time to launch them."""
        ...

    def host_seconds(self, run: Run, calls: int) -> float | None:
        """Seconds until one call returns on the host, with the device idle; `None` if host and device are one."""
        ...

    def eager_seconds(self, run: Run, calls: int) -> float:
        """Seconds of one call: the mean of `calls` back to back, by the wall clock, host and device together."""
        ...

    def replayable(self, runs: Sequence[Run]) -> Run:
        """A function that does all of `runs` with as little host time as the device allows."""
        ...

    def state(self) -> dict[str, Any]:
        """Clock rates, power and temperature now, as far as the machine reports them."""
        ...
