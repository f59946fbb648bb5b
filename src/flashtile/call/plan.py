"""A plan: the value that the planner makes and backends take."""

from typing import Any, NamedTuple


class Plan(NamedTuple):
    """The way to run one pass of a problem. Forward leaves the same results for backward in every backend, so each pass
    has a plan of its own. `why` has, for each backend that was asked before, the reason it declined.
    """

    backend: str
    tile: Any
    num_splits: int
    why: tuple[tuple[str, str], ...]
