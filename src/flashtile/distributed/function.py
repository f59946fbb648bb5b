"""The autograd function of a scheme: merged results with their sinks, and all gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend.epilogue import sink_weight, sum_to_heads
from ..call.call import DIFFERENTIABLE, Tensors, differentiable_positions
from ..call.problem import accumulation_dtype
from . import gather, ring
from .group import Group
from .parts import Whole
from .passes import Saved
from .sums import weight

SCHEMES = {"ring": ring, "gather": gather}
SINKS = DIFFERENTIABLE.index("sinks")


class Sharded(torch.autograd.Function):
    """Attention of this rank's rows over the keys of all ranks of a group; `flat` is `Tensors.flat()`. `known` are
    results of an earlier call, whose gradients are requested.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, scheme: str, whole: Whole, group: Group, known: tuple[Tensor, Tensor] | None, *flat: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        tensors = Tensors.from_flat(flat)
        if known is not None:
            out, lse = (x.detach() for x in known)
        else:
            out, lse = SCHEMES[scheme].forward(whole, tensors, group)
            if tensors.sinks is not None:
                out, lse = with_sinks(out, lse, tensors.sinks)
            out = out.to(tensors.q.dtype)
        # One tensor more than a call of one device saves: PyTorch refuses a checkpoint whose forward pass was sharded
        # and whose recomputation is not, as backward began outside of the context.
        ctx.save_for_backward(out, lse, *flat, out.new_empty(0))
        ctx.scheme, ctx.whole, ctx.group = scheme, whole, group
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        out, lse, *flat, _ = ctx.saved_tensors
        tensors, saved = Tensors.from_flat(flat), Saved(out, lse, dout, dlse)
        positions = differentiable_positions(len(flat))
        needs = [ctx.needs_input_grad[4 + n] for n in positions]
        others = zeros_of_others(tensors, needs)
        dq, dk, dv = SCHEMES[ctx.scheme].backward(ctx.whole, tensors, ctx.group, saved, needs, others)
        dsinks = sink_gradient(tensors.sinks, saved) if needs[SINKS] and tensors.sinks is not None else None
        sums = others._replace(k=dk, v=dv, sinks=dsinks).flat()
        gradients: list[Tensor | None] = [None] * len(flat)
        for n, total, needed in zip(positions, [dq, *(sums[n] for n in positions[1:])], needs, strict=True):
            x = flat[n]
            gradients[n] = total.to(x.dtype) if needed and total is not None and x is not None else None
        return None, None, None, None, *gradients


def zeros_of_others(tensors: Tensors, needs: list[bool]) -> Tensors:
    """Zeros in the accumulation dtype for each requested gradient of tensors that are not rows, nor sinks."""
    flat, dtype = tensors.flat(), accumulation_dtype(tensors.q.dtype)
    sums: list[Tensor | None] = [None] * len(flat)
    for n, needed in list(zip(differentiable_positions(len(flat)), needs, strict=True))[3:]:
        x = flat[n]
        if x is not None and needed:
            sums[n] = torch.zeros_like(x, dtype=dtype)
    return Tensors.from_flat(sums)._replace(q=tensors.q, k=tensors.k, v=tensors.v, sinks=None)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The results with a key without a value in each row, whose score is the sink of the head."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out * weight(lse, total)[..., None], total


def sink_gradient(sinks: Tensor, saved: Saved) -> Tensor:
    """The gradient of the sinks from this rank's rows, `[H]`."""
    lse = saved.lse
    towards = torch.zeros_like(lse) if saved.dlse is None else saved.dlse.to(lse.dtype)
    if saved.dout is not None:
        towards = towards - (saved.out.to(lse.dtype) * saved.dout.to(lse.dtype)).sum(dim=-1)
    return sum_to_heads(sink_weight(sinks.to(lse.dtype)[:, None], lse) * towards)
