"""Planning for the reference backend, which supports every problem and holds the whole score matrix."""

from typing import TYPE_CHECKING

from ...call.call import Call, Needs
from ...call.device import Device
from ...call.eight_bit import PACKED, READS_A_COPY
from ...call.plan import Candidate, Plan
from ...call.problem import Problem
from ..blockwise import PRODUCTS_OF_PYTORCH

if TYPE_CHECKING:
    from ..blockwise.tiles import TileShape

SUMMARY = "dense torch operations: the formulas as they are written, O(S^2) memory, to compare with"


def unusable() -> str | None:
    return None


def declines(problem: Problem, device: Device) -> str | None:
    """Why the backend does not take a problem; `None` if it does."""
    if problem.eight_bit == PACKED:
        return READS_A_COPY
    return PRODUCTS_OF_PYTORCH if problem.batch_invariant else None


def candidates(problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
    """The one way to run a pass; `auto` never takes it."""
    return [Candidate(tile(problem), 1, float("inf"))]


def tile(problem: Problem) -> "TileShape":
    """One tile: the whole call."""
    from ..blockwise.tiles import TileShape  # deferred: `import flashtile` must be fast

    return TileShape(problem.seqlen_q, problem.seqlen_k, problem.num_heads_kv, max(problem.batch, 1))


def unsplit(plan: Plan, call: Call) -> str:
    return f"{plan.backend} takes keys in order"
