"""A plan: the value that the planner makes and backends take."""

from typing import Any, NamedTuple

from .call import Needs


class Candidate(NamedTuple):
    """A way to run a pass of a problem, and the time that it is expected to take on the device; 0 where nothing else is
    as fast.
    """

    tile: Any
    num_splits: int
    microseconds: float


class Plan(NamedTuple):
    """The way to run one pass of a problem. Forward leaves the same results for backward in every backend, so each pass
    has a plan of its own. `why` has, for each backend before this one, the reason it declined or its expected time.
    """

    backend: str
    tile: Any
    num_splits: int
    why: tuple[tuple[str, str], ...]
    rest: "Rest | None" = None  # rest of a backward pass, where a second backend computes some of the gradients
    microseconds: float = 0.0  # that it is expected to take; on a CPU, on one thread


class Rest(NamedTuple):
    """The gradients that a plan's backend leaves to another one, and that one's plan."""

    own: Needs  # those of the first backend
    needs: Needs
    plan: Plan

    def in_words(self) -> dict[str, str]:
        """The backend of each of these gradients, by the name of its input."""
        needs = self.needs._asdict()
        needs["score_mod_tensors"] = any(needs["score_mod_tensors"])
        return {name: self.plan.backend for name, needed in needs.items() if needed}
