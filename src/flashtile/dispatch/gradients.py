"""The gradients of a call as a node of autograd's graph, which can be differentiated again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..call.call import Call, Tensors, differentiable_positions
from ..call.eager import in_forward_mode
from ..dynamo import untraced
from . import batched, operators
from .derivatives import (
    GradientCall,
    attention_function,
    in_places,
    recomputed,
)

Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # out, lse, dout and dlse


def in_graph() -> bool:
    """Whether a transform of torch.func or a compiler looks on."""
    return private_torch.maybe_current_level() is not None or torch.compiler.is_compiling()


def applied(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """`function.apply`, which binds its arguments to the names of `forward` each time. That takes longer than all else
    that a call does before its kernels; without a transform of torch.func it need not.
    """
    if in_graph():
        return function.apply(*arguments)
    unwrap_if_dead = private_torch.unwrap_if_dead
    if unwrap_if_dead is not None:
        arguments = tuple([unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments])
    return private_torch.apply_at_one_level(function)(*arguments)


def input_gradients(call: Call, results: Results, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of `call.tensors.flat()` that are needed."""
    out, lse, dout, dlse = results
    if batched.is_batched(dout) or batched.is_batched(dlse):
        return batched.one_by_one(lambda *x: input_gradients(call, (out, lse, *x), needed), dout, dlse)
    flat = call.tensors.flat()
    positions = differentiable_positions(len(flat))
    needs = [needed[n] for n in positions]
    if torch.is_grad_enabled() or in_graph() or in_forward_mode():
        requested = applied(AttentionBackward, GradientCall(call.settings, needs), *results, *flat)
    else:  # not differentiated again
        requested = operators.replayed_backward(needs, results, call)
        if requested is None:
            requested = operators.operators_of(call).differentiate(needs, *results, call)
    gradients: list[Tensor | None] = [None] * len(flat)
    for n, gradient in zip(positions, requested, strict=True):
        if gradient is not None and needed[n] and (x := flat[n]) is not None:
            gradients[n] = operators.in_dtype(gradient, x.dtype)
    return gradients


class AttentionBackward(torch.autograd.Function):
    """The backward operator as a node of its own, so that it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(of: GradientCall, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        out, lse, dout, dlse, *flat = tensors
        assert out is not None
        assert lse is not None
        call = Call(Tensors.from_flat(flat), of.settings)
        requested = operators.operators_of(call).differentiate(of.needs, out, lse, dout, dlse, call)
        return tuple(out.new_empty(0) if gradient is None else gradient for gradient in requested)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.of, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        from . import second  # here and below: not needed by `import flashtile`

        settings, (_, _, dout, dlse, *flat) = ctx.of.settings, ctx.saved_tensors
        directions = in_places(len(flat), ctx.of.needs, cotangents)
        upper_needed, needed = ctx.needs_input_grad[3:5], ctx.needs_input_grad[5:]
        of_upper: tuple[Tensor | None, ...] = (None, None)
        gradients: list[Tensor | None] = [None] * len(flat)
        if any(upper_needed):
            *of_upper, gradients = second.tangents_and_gradients(settings, flat, directions, (dout, dlse), needed)  # type: ignore[assignment]
        elif any(needed):
            gradients = second.gradients_of_tangents(settings, flat, directions, (dout, dlse), needed)
        upper = (x if n else None for x, n in zip(of_upper, upper_needed, strict=True))
        return None, None, None, *upper, *gradients

    @staticmethod
    @untraced
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        out, lse, dout, dlse, *flat = ctx.saved_tensors
        return recomputed(tangents_of_gradients, ctx.of, (out, lse, dout, dlse), flat, tangents[3:])


def tangents_of_gradients(
    of: GradientCall,
    saved: Sequence[Tensor | None],
    flat: Sequence[Tensor | None],
    tangents: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The tangents of the needed gradients, from the tangents of `dout`, `dlse` and the inputs."""
    from . import second

    out, lse, dout, dlse = saved
    ddout, ddlse, *directions = tangents
    results: list[Tensor | None] = [None] * len(of.needs)
    if any(x is not None for x in directions):
        needed = in_places(len(flat), of.needs, of.needs)
        gradients = second.gradients_of_tangents(of.settings, flat, directions, (dout, dlse), needed)
        results = [gradients[n] for n in differentiable_positions(len(flat))]
    if ddout is not None or ddlse is not None:
        linear = gradients_of_results(of, out, lse, ddout, ddlse, flat)
        results = [x if y is None else y if x is None else x + y for x, y in zip(results, linear, strict=True)]
    assert out is not None
    return tuple(x if needed else out.new_empty(0) for x, needed in zip(results, of.needs, strict=True))  # type: ignore[misc]


def gradients_of_results(
    of: GradientCall,
    out: Tensor | None,
    lse: Tensor | None,
    dout: Tensor | None,
    dlse: Tensor | None,
    flat: Sequence[Tensor | None],
) -> Sequence[Tensor | None]:
    """The needed gradients; in other places anything."""
    from ..backend.tiled.transforms import in_plain_dual_level, pullback

    if not in_plain_dual_level():
        return applied(AttentionBackward, of, out, lse, dout, dlse, *flat)
    # For cotangents that `torch._vmap_internals` batches, the operator has no rule.
    wanted = [n for n, needed in zip(differentiable_positions(len(flat)), of.needs, strict=True) if needed]
    found = iter(pullback(attention_function(of.settings, 1), len(flat), wanted)(*flat, dout, dlse))
    return [next(found) if needed else None for needed in of.needs]
