"""Differentiation: which derivative an operator computes, and which are left to differentiable operations.

First reverse-mode derivatives have an operator. Everything else (forward mode, second derivatives, and what torch.func
nests out of them) is computed by `backend.tiled.transforms`, block by block, in operations that PyTorch can see.

In eager mode an autograd.Function calls the operators: it is quicker than a derivative registered with an operator, and
can be differentiated again. In a compiled graph there is the operator alone, with its registered derivative.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..call.call import Call, Settings, Tensors, differentiable_positions
from ..call.eager import in_forward_mode
from ..call.problem import Problem
from ..errors import AttentionError
from . import operators
from .planner import plan


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a normalised call, differentiable where a tensor requires it."""
    if call.is_plain_eager:
        if torch.is_grad_enabled() and requires_grad(flat := call.tensors.flat()):
            return applied(Attention, call, *flat, is_plain_eager=True)
        return operators.run_forward(call)
    if in_forward_mode():
        refuse_lost_tangents()
        return attend_in_operations(call.settings, *call.tensors.flat())
    operator = operators.operators_of(call)
    if torch.compiler.is_compiling():  # in a graph, the operator has its own derivative
        return operator.forward(*operator.arguments(call))
    if torch.is_grad_enabled():
        flat = call.tensors.flat()
        # Under torch.func, a tensor that is differentiated may be hidden inside another transform's wrapper.
        if private_torch.maybe_current_level() is not None or requires_grad(flat):
            return applied(Attention, call, *flat)
    return operator.forward(*operator.arguments(call))


def requires_grad(tensors: Iterable[Tensor | None]) -> bool:
    for x in tensors:  # noqa: SIM110 - a generator takes longer
        if x is not None and x.requires_grad:
            return True
    return False


def refuse_lost_tangents() -> None:
    """Raise an error where PyTorch itself loses tangents without a word."""
    if torch.compiler.is_compiling():  # in a graph with a part of these operations (torch 2.11)
        where, accepted = "cannot be compiled", "the same outside torch.compile"
    elif torch.is_inference_mode_enabled():  # torch.func.jvp has left it, from torch 2.12 on
        where, accepted = "has no tangents in inference mode", "the same inside torch.no_grad"
    else:
        return
    raise AttentionError(
        f"forward mode (torch.func.jvp, torch.autograd.forward_ad) around attention {where}.\n  accepted: {accepted}"
    )


def in_graph() -> bool:
    """Whether a transform of torch.func or a compiler looks on."""
    return private_torch.maybe_current_level() is not None or torch.compiler.is_compiling()


def applied(function: type[torch.autograd.Function], *arguments: Any, is_plain_eager: bool = False) -> Any:
    """`function.apply`, which binds its arguments to the names of `forward` each time. That takes longer than all else
    that a call does before its kernels; without a transform of torch.func it need not. Unobserved arguments are no
    wrappers that one has left.
    """
    if in_graph():
        return function.apply(*arguments)
    unwrap_if_dead = private_torch.unwrap_if_dead
    if not is_plain_eager and unwrap_if_dead is not None:
        arguments = tuple([unwrap_if_dead(x) if isinstance(x, Tensor) else x for x in arguments])
    return private_torch.apply_at_one_level(function, *arguments)


class Attention(torch.autograd.Function):
    """Autograd of both layouts; `flat` is `call.tensors.flat()`, wrapped by whatever transform looks on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, *flat: Tensor | None) -> tuple[Tensor, Tensor]:
        if call.is_plain_eager:
            return operators.run_forward(call)
        operator = operators.operators_of(call)
        return operator.forward(*operator.arguments(Call(Tensors.from_flat(flat), call.settings)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *flat = inputs
        ctx.settings, ctx.entry = call.settings, call.entry
        ctx.save_for_backward(*output, *flat)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        out, lse, *flat = ctx.saved_tensors
        if dout is None and dlse is None:  # a second derivative passes here without a gradient of the results
            return None, *(None for _ in flat)
        needed = ctx.needs_input_grad[1:]
        positions = differentiable_positions(len(flat))
        needs = [needed[n] for n in positions]
        if torch.is_grad_enabled() or in_graph() or in_forward_mode():
            requested = applied(AttentionBackward, ctx.settings, needs, out, lse, dout, dlse, *flat)
        else:  # not differentiated again
            call = Call(Tensors.from_flat(flat), ctx.settings, ctx.entry)
            requested = operators.operators_of(call).differentiate(needs, out, lse, dout, dlse, call)
        gradients: list[Tensor | None] = [None] * len(flat)
        for n, gradient in zip(positions, requested, strict=True):
            gradients[n] = gradient if needed[n] else None
        return None, *gradients


class AttentionBackward(torch.autograd.Function):
    """The backward operator as a node of its own, so that it can be differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(settings: Settings, needs: list[bool], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        out, lse, dout, dlse, *flat = tensors
        assert out is not None
        assert lse is not None
        call = Call(Tensors.from_flat(flat), settings)
        requested = operators.operators_of(call).differentiate(needs, out, lse, dout, dlse, call)
        return tuple(out.new_empty(0) if gradient is None else gradient for gradient in requested)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings, ctx.needs, _, _, *rest = inputs  # out and lse follow from the rest
        ctx.save_for_backward(*rest)
        ctx.save_for_forward(*rest)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        from ..backend.tiled.transforms import pullback

        inputs = ctx.saved_tensors  # dout, dlse, *flat
        wanted = [n for n, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        used_cotangents = [cotangent for cotangent, needed in zip(cotangents, ctx.needs, strict=True) if needed]
        requested = pullback(gradients_in_operations(ctx.settings, ctx.needs), len(inputs), wanted)(
            *inputs, *used_cotangents
        )
        gradients: list[Tensor | None] = [None] * len(inputs)
        for n, gradient in zip(wanted, requested, strict=True):
            gradients[n] = gradient
        return None, None, None, None, *gradients

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        from ..backend.tiled.transforms import pushforward

        inputs = ctx.saved_tensors
        moving = [n for n, tangent in enumerate(tangents[4:]) if tangent is not None]
        used_tangents = [tangents[4 + n] for n in moving]
        fn = gradients_in_operations(ctx.settings, ctx.needs)
        results = iter(pushforward(fn, len(inputs), moving)(*inputs, *used_tangents))
        return tuple(next(results) if needed else inputs[2].new_empty(0) for needed in ctx.needs)


def attend_in_operations(
    settings: Settings, *flat: Tensor | None, second_derivatives_only: bool = False
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` by operations that every transform sees through."""
    from ..backend.tiled import transforms

    call = Call(Tensors.from_flat(flat), settings)
    problem, device = Problem.describe(call), call.tensors.q.device
    if settings.backend != "auto":
        plan(problem, device, settings.backend)  # a backend that is asked for has to take the call
    chosen = plan(problem, device, "reference" if settings.backend == "reference" else "tiled")
    return transforms.attend(chosen, call, second_derivatives_only=second_derivatives_only)


def gradients_in_operations(settings: Settings, needs: list[bool]) -> Any:
    """`(dout, dlse, *flat) ->` the gradients that `needs` asks for, in the order of `differentiable_positions`; to be
    differentiated, for their values are not computed.
    """
    from ..backend.tiled.transforms import pullback

    def gradients(dout: Tensor | None, dlse: Tensor | None, *flat: Tensor | None) -> tuple[Tensor, ...]:
        def attention(*inputs: Tensor | None) -> tuple[Tensor, Tensor]:
            return attend_in_operations(settings._replace(backend="tiled"), *inputs, second_derivatives_only=True)

        wanted = [n for n, needed in zip(differentiable_positions(len(flat)), needs, strict=True) if needed]
        return pullback(attention, len(flat), wanted)(*flat, dout, dlse)

    return gradients
