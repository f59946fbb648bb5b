"""Forward mode: results and tangents by one operator.

A call whose innermost transform is forward mode gets tensors with tangents. They are taken apart, an operator computes
the results and their tangents in one pass over the scores, and these are put together again. So the pass itself is an
ordinary function of inputs and tangents: reverse mode goes through the results by the backward operator, and through
the tangents by the composed second derivative.

Where another transform is inside of forward mode, `autograd.Attention` has computed the results before PyTorch asks for
their tangents.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import private_torch
from ..call.call import DIFFERENTIABLE, Call, Settings, Tangents, Tensors, differentiable_positions, split_row_stats
from ..call.eager import in_forward_mode
from ..dynamo import untraced
from ..expression.registry import held
from . import batched, operators
from .derivatives import recomputed, tangents_of_tangents, with_still_residual
from .derivatives import tangents_of_row_stats as composed_tangents
from .gradients import applied, input_gradients

Optional = Sequence[Tensor | None]


@dataclass(frozen=True)  # not a tuple, which vmap takes for several inputs
class DualCall:
    """The settings of a call, the number of its tensors, and those tensors with their tangents where a graph that
    outlives this pass may be differentiated in the same forward-mode level.
    """

    settings: Settings
    num_flat: int
    duals: Optional | None = None


def attend_with_duals(call: Call) -> tuple[Tensor, Tensor] | None:
    """`out` and `lse`, with its residual where that is kept, and their tangents. `None` without tangents of the
    innermost transform, where an older mechanism than torch.func's batches them, and where this PyTorch lacks what an
    operator needs.
    """
    if not (private_torch.differentiates_inside_operators and private_torch.innermost_is_forward()):
        return None
    flat = call.tensors.flat()
    pairs = [(x, None) if x is None else forward_ad.unpack_dual(x) for x in flat]
    tangents = of_inputs(call, [tangent for _, tangent in pairs])
    if all(x is None for x in tangents) or any(batched.is_batched(x) for x in tangents):
        return None
    outside = private_torch.maybe_current_level() is None
    of = DualCall(call.settings, len(flat), flat if outside and torch.is_grad_enabled() else None)
    out, row_stats, dout, dstats = applied(AttentionTangents, of, *(x for x, _ in pairs), *tangents)
    return forward_ad.make_dual(out, dout), forward_ad.make_dual(row_stats, dstats)


def tangents_of_row_stats(settings: Settings, flat: Optional, tangents: Optional) -> tuple[Tensor, ...]:
    """The tangents of what a forward pass returns, in the jvp of an autograd.Function."""
    if not private_torch.differentiates_inside_operators or any(batched.is_batched(x) for x in tangents):
        return recomputed(composed_tangents, settings, flat, tangents)
    moving = of_inputs(Call(Tensors.from_flat(flat), settings), tangents)
    return applied(AttentionTangents, DualCall(settings, len(flat)), *flat, *moving)[2:]  # type: ignore[no-any-return]


def of_inputs(call: Call, tangents: Optional) -> list[Tensor | None]:
    """The tangents of differentiable inputs. None passes through what a mask function reads."""
    of_mask = len(DIFFERENTIABLE) + call.num_score_tensors
    positions = differentiable_positions(len(tangents))
    return [tangents[p] if n < of_mask else None for n, p in enumerate(positions)]


class AttentionTangents(torch.autograd.Function):
    """`out`, `lse` and their tangents, as a function of `Tensors.flat()` and the tangents of differentiable inputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(of: DualCall, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        flat, tangents = tensors[: of.num_flat], tensors[of.num_flat :]
        call = Call(Tensors.from_flat(flat), of.settings)
        with operators.handled_tangents():
            *results, dlse = operators.operators_of(call).with_tangents(call, Tangents.from_flat(tangents))
        return *results, with_still_residual(call, dlse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        of, *tensors = inputs
        ctx.settings, ctx.num_flat = of.settings, of.num_flat
        ctx.save_for_backward(*output[:2], *(of.duals or tensors[: of.num_flat]), *tensors[of.num_flat :])
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*output[:2], *tensors)

    @staticmethod
    @untraced
    def jvp(ctx: Any, _: None, *moving: Tensor | None) -> tuple[Tensor, ...]:
        _, _, *tensors = ctx.saved_tensors
        parts = [x[n] for x in (tensors, moving) for n in (slice(ctx.num_flat), slice(ctx.num_flat, None))]
        return recomputed(tangents_of_tangents, ctx.settings, *parts)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        out, row_stats, *tensors = ctx.saved_tensors
        flat, tangents = tensors[: ctx.num_flat], tensors[ctx.num_flat :]
        call = Call(Tensors.from_flat(flat), ctx.settings)
        cout, cstats, cdout, cdstats = cotangents
        clse, cdlse = (None if x is None else split_row_stats(call.tensors.q, x)[0] for x in (cstats, cdstats))
        needed = ctx.needs_input_grad[1:]
        return None, *gradients_of_both(call, tangents, (out, row_stats), (cout, clse, cdout, cdlse), needed)


def gradients_of_both(
    call: Call,
    tangents: Optional,
    results: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The needed gradients of `call.tensors.flat()` and of the inputs' tangents, from the cotangents of `out`, `lse`
    and their tangents. The results' tangents are linear in the inputs', whose gradients so come from the backward
    operator.
    """
    out, row_stats = results[0], results[1].detach()  # as in `autograd.Attention`
    flat, (cout, clse, cdout, cdlse) = call.tensors.flat(), cotangents
    num_flat, positions = len(flat), differentiable_positions(len(flat))
    of_flat: list[Tensor | None] = [None] * num_flat
    of_tangents: list[Tensor | None] = [None] * len(tangents)
    if (cout is not None or clse is not None) and any(needed[:num_flat]):
        of_flat = input_gradients(call, (out, row_stats, cout, clse), needed[:num_flat])
    if cdout is None and cdlse is None:
        return [*of_flat, *of_tangents]
    if any(needed[:num_flat]):
        directions: list[Tensor | None] = [None] * num_flat
        for p, dx in zip(positions, tangents, strict=True):
            directions[p] = dx
        from .second import gradients_of_tangents  # not needed by `import flashtile`

        second = gradients_of_tangents(call.settings, flat, directions, (cdout, cdlse), needed[:num_flat])
        of_flat = [x if y is None else y if x is None else x + y for x, y in zip(of_flat, second, strict=True)]
    if any(needed[num_flat:]):
        wanted = [False] * num_flat
        for p, x in zip(positions, needed[num_flat:], strict=True):
            wanted[p] = x
        linear = input_gradients(call, (out, row_stats, cdout, cdlse), wanted)
        of_tangents = [linear[p] for p in positions]
    return [*of_flat, *of_tangents]


class TangentsOfProgram(AttentionTangents):
    """An operator of forward mode in a traced program, as of a function that torch.func.linearize returns, at the level
    whose tensors it gets.
    """

    @staticmethod
    def forward(of: DualCall, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Outer levels differentiate too: what PyTorch turns off in here is for this one."""
        with torch.enable_grad(), private_torch.forward_mode(), private_torch.AutoDispatchBelowAutograd():
            return AttentionTangents.forward(of, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        AttentionTangents.setup_context(ctx, inputs, output)
        settings = inputs[0].settings
        ctx.functions = held(settings.score_mod, settings.mask_mod)

    @staticmethod
    @untraced
    def jvp(ctx: Any, _: None, *moving: Tensor | None) -> tuple[Tensor, ...]:
        """Apply the operator to the tangents of tangents, in which it is linear. An input that moves too is refused: it
        needs another level's function.
        """
        if any(x is not None for x in moving[: ctx.num_flat]):
            raise operators.dropped_tangents()
        out, row_stats, *tensors = ctx.saved_tensors
        flat = tensors[: ctx.num_flat]
        call = Call(Tensors.from_flat(flat), ctx.settings)
        with operators.handled_tangents():
            along = Tangents.from_flat(moving[ctx.num_flat :])
            dout, dlse = operators.operators_of(call).with_tangents(call, along)[2:]
        return torch.zeros_like(out), torch.zeros_like(row_stats), dout, with_still_residual(call, dlse)


def run_differentiated(
    moves: list[bool], tangents: list[Tensor], *arguments: Any, of: operators.Operators
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """An operator of forward mode with its derivatives. PyTorch's `register_autograd` makes a function that torch.func
    does not take (before 2.15), and that has no forward mode.
    """
    call = of.call(arguments)
    flat, found = call.tensors.flat(), iter(tangents)
    moving = [next(found) if x else None for x in moves]
    forward = in_forward_mode() and private_torch.is_forward_mode_enabled()
    reverse = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*flat, *moving))
    if not (forward or reverse):
        with private_torch.AutoDispatchBelowAutograd():
            return of.tangents(moves, tangents, *arguments)  # type: ignore[no-any-return]
    with private_torch.single_level():
        apply = private_torch.apply_at_one_level(TangentsOfProgram)
        out, row_stats, dout, dstats = apply(DualCall(call.settings, len(flat)), *flat, *moving)
    return out, row_stats, dout, split_row_stats(call.tensors.q, dstats)[0]


if private_torch.AutoDispatchBelowAutograd is not None:
    for _of in operators.OPERATORS.values():
        operators.LIBRARY.impl(f"{_of.name}_tangents", functools.partial(run_differentiated, of=_of), "Autograd")
