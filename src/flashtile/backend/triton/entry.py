"""Entry points of the Triton backend: forward, backward, and attention with a KV cache."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...call.cache import CacheCall
from ...call.cache import append_and_rotate as in_operations
from ...call.call import Call, Gradients, Needs, Tangents
from ...call.plan import Plan
from ..gpu import replay
from ..replays import ForwardReplay, TangentsReplay, inputs_of
from .launch import called
from .launch.cache import appendable, attention_after, launch_append, launch_with_cache
from .launch.forward import launch_forward
from .tile_config import BlockedSecond


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    return call.keep(replay.run(call.inputs, launch_forward, plan, call))


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, and the function that repeats it for calls of the same layout."""
    recording, results = replay.record(call.inputs, launch_forward, plan, call)
    return ForwardReplay(recording), call.keep(results)


def tangents(plan: Plan, call: Call, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .launch.tangents import launch_tangents  # not needed by other passes

    return replay.run(inputs_of(call, tangents), launch_tangents, plan, call, tangents.moves)  # type: ignore[return-value]


def record_tangents(plan: Plan, call: Call, tangents: Tangents) -> tuple[Any, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """As `tangents`, and the function that repeats it for calls of the same layout."""
    from .launch.tangents import launch_tangents

    recording, results = replay.record(inputs_of(call, tangents), launch_tangents, plan, call, tangents.moves)
    return TangentsReplay(recording), results  # type: ignore[return-value]


def before_second(plan: Plan) -> str:
    """The pass whose results a second derivative starts from, of whatever backend: "tangents" or "forward"."""
    return "forward" if isinstance(plan.tile.second, BlockedSecond) else "tangents"


def second(
    plan: Plan,
    call: Call,
    along: Tangents,
    needs: Needs,
    dout: Tensor | None,
    dlse: Tensor | None,
    before: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Gradients]:
    """The tangents of out and lse, and gradients; `before` has the results of forward or of forward mode."""
    if before_second(plan) == "forward":  # neither is needed by other passes
        from .launch.second_blocks import launch_second_blocks as launch_second
    else:
        from .launch.second import launch_second

    moving = [x for x in along.flat() if x is not None]
    inputs = (*call.inputs, *moving, *before, dout, dlse)
    tout, tlse, *gradients = replay.run(inputs, launch_second, plan, call, along.moves, needs)
    return tout, tlse, Gradients.from_flat(gradients)  # type: ignore[return-value]


def tiles(plan: Plan, call: Call, needs: Needs | None) -> dict[str, Any]:
    """The tiles of the kernels that a call runs in forward or, with `needs`, in backward, by name."""
    return called.tiles(plan.tile, call, needs)


def __getattr__(name: str) -> Any:
    """Import the backward pass on first use: it takes a third of the time to import all launch code."""
    if name not in ("backward", "record_backward"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .launch import backward as launches

    globals()[name] = getattr(launches, name)
    return globals()[name]


def attend_with_cache(plan: Plan, call: CacheCall) -> tuple[Tensor, Tensor]:
    """Append, rotate and attend: at most three launches, instead of some thirty operations."""
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        return forward(plan, in_operations(call))
    out, lse = replay.run(call.inputs, launch_with_cache, plan, call)
    return out, lse  # type: ignore[return-value]


def record_attend_with_cache(plan: Plan, call: CacheCall) -> tuple[Any, tuple[Tensor, Tensor]]:
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        repeat, results = record_forward(plan, in_operations(call))
        return lambda call: repeat(in_operations(call)), results
    recording, (out, lse) = replay.record(call.inputs, launch_with_cache, plan, call)
    return ForwardReplay(recording), (out, lse)  # type: ignore[return-value]


def append(call: CacheCall) -> Call:
    """Append and rotate by a kernel; what remains is the attention over pages, of this backend or another one."""
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        return in_operations(call)
    return attention_after(call, replay.run(call.inputs, launch_append, call))


def record_append(call: CacheCall) -> tuple[Any, Call]:
    """As `append`, and the function that repeats it for calls of the same layout."""
    if not appendable(call.cache, call.tensors.cu_seqlens_q):
        return in_operations, in_operations(call)
    recording, results = replay.record(call.inputs, launch_append, call)
    return lambda call: attention_after(call, recording(call.inputs)), attention_after(call, results)
