"""Tangents, and second derivatives, composed of `backend.tiled.transforms`.

With H the Hessian of `L = sum(dout * out) + sum(dlse * lse)`, a second derivative is H times the directions that come
with the gradients' cotangents or the inputs' tangents. H is symmetric, so this is the gradient of L's tangent along the
directions. The gradient of a gradient would take a third more matrix products: directions need no gradient themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from ..call.call import Call, Settings, Tensors, differentiable_positions
from ..call.problem import Problem
from .planner import plan


@dataclass(frozen=True)  # not a tuple, which vmap takes for several inputs
class GradientCall:
    """The settings of a call, and which gradients are needed."""

    settings: Settings
    needs: list[bool]


def in_places(num_flat: int, needs: list[bool], values: Sequence[Any]) -> list[Any]:
    """The values of needed gradients at the places of their inputs in `Tensors.flat()`, and `None` elsewhere."""
    result: list[Any] = [None] * num_flat
    for n, needed, value in zip(differentiable_positions(num_flat), needs, values, strict=True):
        result[n] = value if needed else None
    return result


def recomputed(function: Any, settings: Any, *groups: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """`function(settings, *groups)` as one operation. In the jvp of an autograd.Function, tangents of outer levels pass
    through a whole Function alone: PyTorch (2.13) drops the tangents of all other operations.
    """
    from ..backend.tiled.transforms import Recompute

    lengths = [len(group) for group in groups]

    def fn(*flat: Tensor | None) -> tuple[Tensor, ...]:
        inputs = iter(flat)
        return function(settings, *([*islice(inputs, n)] for n in lengths))

    return Recompute.apply(fn, None, *chain.from_iterable(groups))  # type: ignore[return-value]


def tangents_of_results(
    settings: Settings, flat: Sequence[Tensor | None], directions: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The tangents of `out` and `lse` along directions, which are `None` for inputs that stand still."""
    moving = [x for x in directions if x is not None]
    return tangent_function(settings, directions, orders_unread=1)(*flat, *moving)


def tangents_of_row_stats(
    settings: Settings, flat: Sequence[Tensor | None], directions: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The tangents of what a forward pass returns: the residual of lse, where it is kept, stands still."""
    dout, dlse = tangents_of_results(settings, flat, directions)
    return dout, with_still_residual(Call(Tensors.from_flat(flat), settings), dlse)


def with_still_residual(call: Call, dlse: Tensor) -> Tensor:
    """The tangent of `lse` as forward leaves it: the residual, where it is kept, stands still."""
    return torch.stack((dlse, torch.zeros_like(dlse))) if call.keeps_residual else dlse


def tangents_of_tangents(
    settings: Settings,
    flat: Sequence[Tensor | None],
    tangents: Sequence[Tensor | None],
    of_flat: Sequence[Tensor | None],
    of_tangents: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The second-order tangents: of `out`, `lse` (as forward leaves it) and their tangents, along `of_flat` for inputs
    and `of_tangents` for the tangents of differentiable inputs.
    """
    from ..backend.tiled.transforms import pushforward, with_pushforward

    places = differentiable_positions(len(flat))
    positions = [p for p, dx in zip(places, tangents, strict=True) if dx is not None]
    both = with_pushforward(attention_function(settings, orders_unread=1), len(flat), positions)
    inputs = [*flat, *(dx for dx in tangents if dx is not None)]
    moving = [*of_flat, *(ddx for dx, ddx in zip(tangents, of_tangents, strict=True) if dx is not None)]
    present = [n for n, x in enumerate(moving) if x is not None]
    dout, dlse, ddout, ddlse = pushforward(both, len(inputs), present)(*inputs, *(moving[n] for n in present))
    call = Call(Tensors.from_flat(flat), settings)
    return dout, with_still_residual(call, dlse), ddout, with_still_residual(call, ddlse)


def gradients_of_tangents(
    settings: Settings,
    flat: Sequence[Tensor | None],
    directions: Sequence[Tensor | None],
    upper: tuple[Tensor | None, Tensor | None],
    needed: Sequence[bool | None],
) -> list[Tensor | None]:
    """The second derivative `H @ directions` by the inputs that are needed; `upper` are `dout` and `dlse`."""
    from ..backend.tiled.transforms import in_plain_dual_level, pullback

    positions = [n for n, x in enumerate(directions) if x is not None]
    moving = [directions[n] for n in positions]
    wanted = [n for n, x in enumerate(needed) if x]
    if in_plain_dual_level():  # directions that `torch._vmap_internals` batches can only be cotangents there
        gradients = pullback(attention_function(settings, orders_unread=2), len(flat), positions)
        found = pullback(gradients, len(flat) + 2, wanted)(*flat, *upper, *moving)
    else:
        tangents = tangent_function(settings, directions, orders_unread=2)
        found = pullback(tangents, len(flat) + len(moving), wanted)(*flat, *moving, *upper)
    result: list[Tensor | None] = [None] * len(flat)
    for n, gradient in zip(wanted, found, strict=True):
        result[n] = gradient
    return result


def tangent_function(settings: Settings, directions: Sequence[Tensor | None], orders_unread: int) -> Any:
    """The function `(*flat, *moving) ->` the tangents of `out` and `lse`, by the directions that are not `None`."""
    from ..backend.tiled.transforms import pushforward

    positions = [n for n, x in enumerate(directions) if x is not None]
    return pushforward(attention_function(settings, orders_unread), len(directions), positions)


def attention_function(settings: Settings, orders_unread: int) -> Any:
    """The function `(*flat) -> (out, lse)` by operations that every transform sees through, to be differentiated: the
    results themselves are not read, and with 2 as `orders_unread` neither are their first derivatives.
    """

    def attention(*flat: Tensor | None) -> tuple[Tensor, Tensor]:
        from ..backend.tiled import transforms

        call = Call(Tensors.from_flat(flat), settings)
        chosen = plan(Problem.describe(call), call.tensors.q.device, "tiled")
        return transforms.attend(chosen, call, orders_unread)

    return attention
