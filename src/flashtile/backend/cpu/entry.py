"""The CPU backend's entries, which the dispatcher calls."""

from typing import Any

from torch import Tensor

from ...call.call import Call, Gradients, Needs, Tangents
from ...call.plan import Plan
from .arguments import uses_matrix_tiles
from .host_backward import backward, record_backward
from .host_cache import record_attend_with_cache
from .host_forward import forward, record_forward
from .host_tangents import tangents
from .targets import host_width

__all__ = [
    "backward",
    "forward",
    "record_attend_with_cache",
    "record_backward",
    "record_forward",
    "second",
    "tangents",
    "tiles",
]


def second(
    plan: Plan, call: Call, along: Tangents, needs: Needs, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Gradients]:
    from .host_second import second as run  # not needed by other passes

    return run(plan, call, along, needs, dout, dlse)


def tiles(plan: Plan, call: Call, needs: Needs | None) -> dict[str, Any]:
    """The tiles of a call's pass, and the instructions of forward's products: AMX's, or vectors'."""
    if needs is not None:
        return plan.tile._asdict()  # type: ignore[no-any-return]
    return plan.tile._asdict() | {"forward by": host_width(uses_matrix_tiles(call, plan.tile))}
