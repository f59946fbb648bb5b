"""Entry points of the Hopper backend: run a pass, or record it for calls of the same layout."""

from typing import Any

from torch import Tensor

from ...call.call import Call, Needs, Tangents
from ...call.plan import Plan
from ..gpu import replay
from ..replays import ForwardReplay, TangentsReplay, inputs_of
from .launch.forward import called_forward, forward_config, launch_forward

APPENDING_BACKEND = "triton"  # whose kernel appends to the caches of KV-cache calls


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call."""
    return call.keep(replay.run(call.inputs, launches_of(plan), forward_config(plan, call), call))


def launches_of(plan: Plan) -> Any:
    """The function that records a plan's launches."""
    if plan.tile.forward.kind == "eight_bit":
        from .launch import eight_bit

        return eight_bit.launch_forward
    if plan.tile.forward.kind != "latent":
        return launch_forward
    from .launch import latent  # not needed by other calls

    return latent.launch_forward


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, and the function that repeats it for calls of the same layout."""
    recording, results = replay.record(call.inputs, launches_of(plan), forward_config(plan, call), call)
    return ForwardReplay(recording), call.keep(results)


def tangents(plan: Plan, call: Call, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`out`, `lse` and their tangents."""
    from .launch.tangents import launch_tangents  # not needed by other passes

    return replay.run(inputs_of(call, tangents), launch_tangents, plan, call, tangents.moves)  # type: ignore[return-value]


def record_tangents(plan: Plan, call: Call, tangents: Tangents) -> tuple[Any, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """As `tangents`, and the function that repeats it for calls of the same layout."""
    from .launch.tangents import launch_tangents

    recording, results = replay.record(inputs_of(call, tangents), launch_tangents, plan, call, tangents.moves)
    return TangentsReplay(recording), results  # type: ignore[return-value]


def tiles(plan: Plan, call: Call, needs: Needs | None) -> dict[str, Any]:
    """The tiles of the kernels that a call runs in forward or, with `needs`, in backward, by name."""
    return {"forward": called_forward(plan, call)} if needs is None else {"backward": plan.tile.backward}


def __getattr__(name: str) -> Any:
    """Import the backward pass on first use: it takes a third of the time to import all launch code."""
    if name not in ("backward", "record_backward"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .launch import backward as launches

    globals()[name] = getattr(launches, name)
    return globals()[name]
