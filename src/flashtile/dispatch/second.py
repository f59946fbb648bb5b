"""Second derivatives: by one operator where a backend has kernels for them, else composed (`derivatives`). Derivatives
of the operator are composed, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import private_torch
from ..backend.tiled.transforms import Recompute, in_plain_dual_level
from ..call.call import Call, Needs, Settings, Tangents, Tensors, differentiable_positions
from ..call.problem import Problem
from ..dynamo import untraced
from . import batched, derivatives, operators
from .planner import plan

Optional = Sequence[Tensor | None]
Upper = tuple[Tensor | None, Tensor | None]  # dout and dlse


def has_kernels(settings: Settings, flat: Optional, directions: Optional, needed: Sequence[bool | None]) -> bool:
    """Whether a backend has kernels for a second derivative, and its operator a rule for whatever looks on."""
    if torch.compiler.is_compiling() or in_plain_dual_level() or not private_torch.differentiates_inside_operators:
        return False
    if any(batched.is_batched(x) for x in (*flat, *directions)):
        return False
    call, places = Call(Tensors.from_flat(flat), settings), differentiable_positions(len(flat))
    moves = Needs.from_flat([directions[p] is not None for p in places])
    needs = Needs.from_flat([bool(needed[p]) for p in places])
    if not any(moves.flat()) or not any(needs.flat()):
        return False
    chosen = plan(Problem.describe(call), call.tensors.q.device, settings.backend, needs=needs, moves=moves)
    return chosen.backend != "tiled"


@dataclass(frozen=True)  # not a tuple, which vmap takes for several inputs
class Second:
    """The tangents of `out` and `lse` along directions, and the gradients of their products with dout and dlse, as a
    function of `(*flat, *directions that are not None, dout, dlse)`.
    """

    settings: Settings
    moving: tuple[bool, ...]  # whether tensors in `flat` have directions
    needed: tuple[bool, ...]

    def __call__(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        """The same, composed."""
        tout, tlse, gradients = composed(self.settings, *self.taken_apart(inputs), self.needed)
        return tout, tlse, *(x for x, needed in zip(gradients, self.needed, strict=True) if needed)  # type: ignore[return-value]

    def by_operator(self, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        flat, directions, (dout, dlse) = self.taken_apart(inputs)
        call, places = Call(Tensors.from_flat(flat), self.settings), differentiable_positions(len(flat))
        needs = Needs.from_flat([self.needed[p] for p in places])
        along = Tangents.from_flat([directions[p] for p in places])
        with operators.handled_tangents():
            tout, tlse, *gradients = operators.operators_of(call).gradients_of_tangents(needs, along, dout, dlse, call)
        return tout, tlse, *(x for x, needed in zip(gradients, needs.flat(), strict=True) if needed)

    def taken_apart(self, inputs: Optional) -> tuple[Optional, Optional, Upper]:
        """The call's tensors, a direction or `None` for each, and dout and dlse."""
        given = iter(inputs[len(self.moving) : -2])
        directions = [next(given) if moving else None for moving in self.moving]
        return inputs[: len(self.moving)], directions, (inputs[-2], inputs[-1])


class ByOperator(Recompute):
    """As `Recompute`, by the operator: a backend's kernels see no transform."""

    @staticmethod
    @untraced
    def forward(fn: Second, unread: None, *inputs: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        return fn.by_operator(*inputs)


def gradients_of_tangents(
    settings: Settings, flat: Optional, directions: Optional, upper: Upper, needed: Sequence[bool | None]
) -> list[Tensor | None]:
    """As `derivatives.gradients_of_tangents`, by kernels if there are any."""
    if has_kernels(settings, flat, directions, needed):
        return by_kernels(settings, flat, directions, upper, needed)[2]
    return derivatives.gradients_of_tangents(settings, flat, directions, upper, needed)


def tangents_and_gradients(
    settings: Settings, flat: Optional, directions: Optional, upper: Upper, needed: Sequence[bool | None]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The tangents of `out` and `lse` along directions, and their gradients as `gradients_of_tangents`."""
    way = by_kernels if has_kernels(settings, flat, directions, needed) else composed
    return way(settings, flat, directions, upper, needed)


def by_kernels(
    settings: Settings, flat: Optional, directions: Optional, upper: Upper, needed: Sequence[bool | None]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """As `tangents_and_gradients`."""
    of = Second(settings, tuple(x is not None for x in directions), tuple(map(bool, needed)))
    moving = [x for x in directions if x is not None]
    tout, tlse, *found = ByOperator.apply(of, None, *flat, *moving, *upper)  # type: ignore[misc]
    given = iter(found)
    return tout, tlse, [next(given) if wanted else None for wanted in of.needed]


def composed(
    settings: Settings, flat: Optional, directions: Optional, upper: Upper, needed: Sequence[bool | None]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """As `tangents_and_gradients`, of operations that every transform sees through."""
    tout, tlse = derivatives.tangents_of_results(settings, flat, directions)
    gradients: list[Tensor | None] = [None] * len(flat)
    if any(needed):
        gradients = derivatives.gradients_of_tangents(settings, flat, directions, upper, needed)
    return tout, tlse, gradients
