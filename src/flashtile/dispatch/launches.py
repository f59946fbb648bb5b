"""The kernel launches of a call and their tiles, without running it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..backend.gpu.replay import Launch, collected_launches
from ..call.cache import CacheCall
from ..call.cache_tensors import CacheTensors
from ..call.call import Call, Needs, Tangents, Tensors, differentiable_positions
from ..call.device import Device, meta_tensors_on
from ..call.memory import address
from ..call.plan import Plan
from .passes import entry_of, function_of
from .planner import SUPPORT, optional

ADDRESS_BITS = 40  # between the addresses of two tensors
ALIGNMENT = 16  # bytes up to which kernels depend on an address


def launches_of(
    call: Call,
    device: Device,
    plan: Plan,
    backward: tuple[Plan, Needs] | None = None,
    along: tuple[Plan, Needs] | None = None,
) -> list[Launch]:
    """The launches of a call's forward pass by `plan`, a plan for `hopper` or `triton`, of its backward pass, and of
    its forward pass along tangents of the inputs that `along` names.
    """
    call = without_memory(call)
    with meta_tensors_on(device), collected_launches() as launches:
        out, lse = function_of(plan, call.kind)(plan, call)
        if backward is not None:
            backward_plan, needs = backward
            dout = torch.empty_like(out)
            function_of(backward_plan, "backward")(backward_plan, call, needs, out, lse, dout, None)
        if along is not None:
            tangents_plan, moves = along
            function_of(tangents_plan, "tangents")(tangents_plan, call, tangents_like(call, moves))
    return launches


def tangents_like(call: Call, moves: Needs) -> Tangents:
    """Tangents without values of the inputs that move."""
    flat, positions = call.tensors.flat(), differentiable_positions(len(call.tensors.flat()))
    given = [flat[n] if moving else None for n, moving in zip(positions, moves.flat(), strict=True)]
    return Tangents.from_flat([None if x is None else torch.empty_like(x) for x in given])


def tiles_of(plan: Plan, call: Call, needs: Needs | None = None) -> dict[str, Any]:
    """The tiles of a call's forward pass by `plan` or, with `needs`, of its backward pass, by name: the plan's,
    which has several calls, unless the backend chooses among them.
    """
    tiles = getattr(entry_of(plan.backend), "tiles", None)
    if tiles is None:
        return plan.tile._asdict()  # type: ignore[no-any-return]
    return tiles(plan, without_memory(call), needs)  # type: ignore[no-any-return]


def tangent_tiles_of(plan: Plan) -> dict[str, Any]:
    """The tiles of a forward pass with tangents, by name: the plan's, or the one that its backend has for the pass."""
    tile = getattr(plan.tile, "tangents", None)
    return plan.tile._asdict() if tile is None else {"tangents": tile}


def unsplit(plan: Plan, call: Call) -> str | None:
    """Why a call's forward pass does not split keys into as many parts as `num_splits` asks for; `None` if it does."""
    if call.settings.num_splits in (None, 1):
        return None
    if call.settings.batch_invariant:
        return "with batch_invariant, positions alone split the keys"
    return optional(SUPPORT[plan.backend], "unsplit", plan, call)


def without_memory(call: Call) -> Call:
    """The same call of tensors on PyTorch's meta device, as aligned as they are."""
    flat = on_meta(call.inputs)
    if not isinstance(call, CacheCall):
        return call._replace(tensors=Tensors.from_flat(flat))
    first, last = len(Tensors._fields) - 1, len(Tensors._fields) - 1 + len(CacheTensors._fields)
    features = Tensors.from_flat((*flat[:first], *flat[last:]))
    return CacheCall(Call(features, call.settings), CacheTensors(*flat[first:last]), call.rotary)  # type: ignore[arg-type]


def on_meta(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Tensors of the same layouts, which do not overlap."""
    made: list[Tensor | None] = []
    for n, x in enumerate(tensors):
        if x is None:
            made.append(None)
            continue
        size = x.element_size()
        offset = ((n + 1) << ADDRESS_BITS) // size + address(x) % ALIGNMENT // size
        span = 1 + sum((length - 1) * stride for length, stride in zip(x.shape, x.stride(), strict=True))
        flat = torch.empty(offset + max(span, 0), dtype=x.dtype, device="meta")
        made.append(flat.as_strided(x.shape, x.stride(), offset))
    return made
