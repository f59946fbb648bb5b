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
from ..call.call import Call, Tensors, public_lse, split_row_stats
from ..call.eager import in_forward_mode
from ..call.eight_bit import FORMATS
from ..dynamo import untraced
from ..errors import AttentionError
from . import fast_path, operators
from .forward_mode import attend_with_duals, tangents_of_row_stats
from .gradients import applied, input_gradients


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a normalized call, differentiable where a tensor requires it."""
    return public_lse(call, attend_with_row_stats(call))


def attend_with_row_stats(call: Call) -> tuple[Tensor, Tensor]:
    """As `attend`, with the residual of `lse` where that is kept."""
    if call.tensors.k.dtype in FORMATS:
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
            f"calls with keys and values of {call.tensors.k.dtype} have no derivatives, and an argument requires a "
            "gradient or forward mode is active.\n"
            "  accepted: a call inside `with torch.no_grad():`; for training, q, k and v in 16 bits or more"
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
    results = attend_with_duals(call)
    return applied(Attention, call, *call.tensors.flat()) if results is None else results


class Attention(torch.autograd.Function):
    """Autograd of both layouts; `flat` is `call.tensors.flat()`, wrapped by whatever transform looks on."""

    generate_vmap_rule = True

    @staticmethod
    def forward(call: Call, *flat: Tensor | None) -> tuple[Tensor, Tensor]:
        if call.is_plain_eager:
            call.is_differentiated = True
            return operators.run_forward(call)
        operator = operators.operators_of(call)
        with operators.handled_tangents():  # in `jvp`
            return operator.forward(*operator.arguments(Call(Tensors.from_flat(flat), call.settings)))

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
        return tangents_of_row_stats(ctx.settings, flat, tangents)

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
