"""Planning for the reference backend, which supports every problem and holds the whole score matrix."""

from typing import TYPE_CHECKING

from ...call.call import Call
from ...call.device import Device
from ...call.plan import Plan
from ...call.problem import Problem

if TYPE_CHECKING:
    from ..blockwise.tiles import TileShape

SUMMARY = "dense torch operations: the formulas as they are written, O(S^2) memory, to compare with"


def unusable() -> str | None:
    return None


def declines(problem: Problem, device: Device) -> str | None:
    return None


def tile(problem: Problem, device: Device) -> "TileShape":
    """One tile: the whole call."""
    from ..blockwise.tiles import TileShape  # deferred: `import flashtile` must be fast

    return TileShape(problem.seqlen_q, problem.seqlen_k, problem.num_heads_kv, max(problem.batch, 1))


def num_splits(problem: Problem, device: Device) -> int:
    """Keys are never split."""
    return 1


def unsplit(plan: Plan, call: Call) -> str:
    return f"{plan.backend} takes keys in order"
