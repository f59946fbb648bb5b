"""The CPU backend's entries, which the dispatcher calls."""

from typing import Any

from torch import Tensor

from ...call.call import Call, Gradients, Needs, Tangents
from ...call.plan import Plan
from .arguments import decode_target, uses_matrix_tiles
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
    """The tiles of a call's pass, and the instructions of forward's products: AMX's, or vectors', over features where
    few rows decode.
    """
    found = {name: x for name, x in plan.tile._asdict().items() if name != "decodes"}
    if needs is not None:
        return found
    by = "decode by" if decode_target(call, plan.tile) is not None else "forward by"
    return found | {by: host_width(uses_matrix_tiles(call, plan.tile))}
