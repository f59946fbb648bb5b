"""Differentiation: which derivative an operator computes, and which are left to differentiable operations.

First reverse-mode derivatives have an operator. Everything else (forward mode, second derivatives, and what torch.func
nests out of them) is computed by `backend.tiled.transforms`, block by block, in operations that PyTorch can see:
`derivatives.py` composes it.

In eager mode an autograd.Function calls the operators: it is quicker than a derivative registered with an operator, and
can be differentiated again. In a compiled graph there is the operator alone, with its registered derivative.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import private_torch
from ..call.call import Call, Tensors, differentiable_positions, public_lse, split_row_stats
from ..call.eager import in_forward_mode
from ..call.eight_bit import is_eight_bit
from ..dynamo import untraced
from ..errors import AttentionError
from . import batched, fast_path, operators
from .derivatives import (
    GradientCall,
    attention_function,
    gradients_of_tangents,
    in_places,
    recomputed,
    tangents_of_results,
    tangents_of_row_stats,
)

Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # out, lse, dout and dlse


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a normalized call, differentiable where a tensor requires it."""
    return public_lse(call, attend_with_row_stats(call))


def attend_with_row_stats(call: Call) -> tuple[Tensor, Tensor]:
    """As `attend`, with the residual of `lse` where that is kept."""
    if is_eight_bit(call.tensors.k):
        refuse_derivatives_of_eight_bits(call)
    if fast_path.bypasses_dispatcher(call):
        if torch.is_grad_enabled() and requires_grad(flat := call.tensors.flat()):
            return attend_with_gradients(call, flat)
        return operators.run_forward(call)
    if in_forward_mode():
        refuse_lost_tangents()
        return attend_with_tangents(call)
    operator = operators.operators_of(call)
    if torch.compiler.is_compiling():  # in a graph, the operator has its own derivative
        return operator.forward(*operator.arguments(call))
    if torch.is_grad_enabled() and not operator_differentiates():
        flat = call.tensors.flat()
        # Under torch.func, a tensor that is differentiated may be hidden inside another transform's wrapper.
        if private_torch.maybe_current_level() is not None or requires_grad(flat):
            return applied(Attention, call, *flat)
    return operator.forward(*operator.arguments(call))


def refuse_derivatives_of_eight_bits(call: Call) -> None:
    if in_forward_mode() or (torch.is_grad_enabled() and requires_grad(call.tensors.flat())):
        raise AttentionError(
            f"keys and values of {call.tensors.k.dtype} have no derivatives, and an argument requires a gradient or "
            "forward mode is active.\n"
            "  accepted: a call inside `with torch.no_grad():`; for training, k and v in the dtype of q"
        )


def operator_differentiates() -> bool:
    """Whether the operator's own derivative is taken: in a trace of torch.jit, which cannot hold a Python function, and
    in torch.func.functionalize, which has no rule for one.
    """
    if private_torch.maybe_current_level() is None:
        return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return private_torch.only_functionalize()


@untraced
def attend_with_gradients(call: Call, flat: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
    """After a graph break, Dynamo would compile this frame, and fail on a private name (torch 2.13)."""
    return applied(Attention, call, *flat)  # type: ignore[no-any-return]


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


@untraced
def attend_with_tangents(call: Call) -> tuple[Tensor, Tensor]:
    """After a graph break, Dynamo would compile this frame, and lose tangents (torch 2.11)."""
    return applied(Attention, call, *call.tensors.flat())


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


class Attention(torch.autograd.Function):
    """Autograd of both layouts; `flat` is `call.tensors.flat()`, wrapped by whatever transform looks on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, *flat: Tensor | None) -> tuple[Tensor, Tensor]:
        if call.is_plain_eager:
            return operators.run_forward(call)
        operator, outer = operators.operators_of(call), operators.tangents.elsewhere
        operators.tangents.elsewhere = True  # in `jvp`
        try:
            return operator.forward(*operator.arguments(Call(Tensors.from_flat(flat), call.settings)))
        finally:
            operators.tangents.elsewhere = outer

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        call, *flat = inputs
        ctx.settings, ctx.entry, ctx.kept = call.settings, call.entry, call.kept
        ctx.save_for_backward(*output, *flat)
        ctx.set_materialize_grads(False)
        ctx.save_for_forward(*output, *flat)

    @staticmethod
    @untraced
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        _, _, *flat = ctx.saved_tensors
        return recomputed(tangents_of_row_stats, ctx.settings, flat, tangents)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dstats: Tensor | None) -> tuple[Any, ...]:
        out, lse, *flat = ctx.saved_tensors
        if dout is None and dstats is None:  # a second derivative passes here without a gradient of the results
            return None, *(None for _ in flat)
        lse = lse.detach()  # as `api.repeated` has it: gradients never depend on its own
        call = Call(Tensors.from_flat(flat), ctx.settings, ctx.entry)
        dlse = None if dstats is None else split_row_stats(call.tensors.q, dstats)[0]
        call.kept = ctx.kept
        return None, *input_gradients(call, (out, lse, dout, dlse), ctx.needs_input_grad[1:])


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
        settings, (_, _, dout, dlse, *flat) = ctx.of.settings, ctx.saved_tensors
        directions = in_places(len(flat), ctx.of.needs, cotangents)
        upper_needed, needed = ctx.needs_input_grad[3:5], ctx.needs_input_grad[5:]
        of_upper: tuple[Tensor | None, ...] = (None, None)
        if any(upper_needed):
            of_upper = tangents_of_results(settings, flat, directions)
        gradients: list[Tensor | None] = [None] * len(flat)
        if any(needed):
            gradients = gradients_of_tangents(settings, flat, directions, (dout, dlse), needed)
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
    out, lse, dout, dlse = saved
    ddout, ddlse, *directions = tangents
    results: list[Tensor | None] = [None] * len(of.needs)
    if any(x is not None for x in directions):
        needed = in_places(len(flat), of.needs, of.needs)
        gradients = gradients_of_tangents(of.settings, flat, directions, (dout, dlse), needed)
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
