"""A plan: the value that the planner makes and backends take."""

from typing import Any, NamedTuple


class Plan(NamedTuple):
    """How one pass of a problem is run. What forward leaves for backward is the same in every backend: each pass has a
    plan of its own. `why` has, for each backend that was asked before, the reason it declined.
    """

    backend: str
    tile: Any
    num_splits: int
    why: tuple[tuple[str, str], ...]
