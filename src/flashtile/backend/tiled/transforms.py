"""Attention for PyTorch's transforms: forward mode, second derivatives, vmap, in any nesting.

The registered operators are opaque and support first reverse-mode derivatives only. This module composes a call of
plain torch operations, one block of rows at a time, each wrapped in `Recompute`, a checkpoint that works under every
transform. Forward mode propagates tangents through the online softmax; reverse mode recomputes one block at a time, so
memory is O(S) for derivatives of every order.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import private_torch
from ...call.call import Call, Tensors
from ...call.plan import Plan
from ...call.problem import accumulation_dtype
from ..blockwise.lse_shape import rows_to_lse
from ..blockwise.scores import Scores
from ..blockwise.tiles import GatheredRows, Side, Slab, TileShape
from .forward import forward_rows
from .parts import RowBlock, row_blocks_of_slabs, shape_of_row_blocks

Function = Callable[..., tuple[Tensor, ...]]
F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Exclude a function from torch.compile. After a graph break, Dynamo compiles the functions that the broken frame
    or autograd calls; in such graphs it mixes up levels of torch.func, and tangents are lost (torch 2.11).
    """
    return torch.compiler.disable(function)  # type: ignore[return-value]


@dataclass(frozen=True)  # not a tuple, which vmap takes for several inputs
class Unread:
    """Results that are not read, so that zeros stand for them. Autograd needs nodes for them, but second derivatives of
    attention depend neither on its results nor on the values of its tangents and gradients.
    """

    results: tuple[tuple[torch.Size, torch.dtype], ...]
    orders: int  # 1: the results alone are not read; 2: nor their first derivatives

    def zeros(self, device: torch.device) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self.results)

    def of_derivative(self, like: Sequence[Tensor] | None = None) -> "Unread | None":
        """The same for a derivative, whose results have the shapes of `like`, or of the results."""
        if self.orders == 1:
            return None
        return Unread(self.results if like is None else tuple((x.shape, x.dtype) for x in like), self.orders - 1)


class Recompute(torch.autograd.Function):
    """`fn(*inputs)`, which saves only its inputs. Its derivatives are `Recompute` of `fn`'s vjp or jvp, so derivatives
    of every order hold the intermediate results of one call at a time.

    `fn` returns a tuple of tensors; its inputs are tensors or `None`.
    """

    generate_vmap_rule = True

    @staticmethod
    @untraced
    def forward(fn: Function, unread: Unread | None, *inputs: Tensor | None) -> tuple[Tensor, ...]:
        if unread is not None:
            assert inputs[0] is not None
            return unread.zeros(inputs[0].device)
        return fn(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.fn, ctx.unread, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    @untraced
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        required = [n for n, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        unread = ctx.unread and ctx.unread.of_derivative([inputs[n] for n in required])
        gradients: list[Tensor | None] = [None] * len(inputs)
        grads = Recompute.apply(pullback(ctx.fn, len(inputs), required), unread, *inputs, *cotangents)
        for n, gradient in zip(required, grads, strict=True):  # type: ignore[arg-type]
            gradients[n] = gradient
        return None, None, *gradients

    @staticmethod
    @untraced
    def jvp(ctx: Any, _: None, __: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        inputs = ctx.saved_tensors
        with_tangent = [n for n, tangent in enumerate(tangents) if tangent is not None]
        moving_tangents = [tangents[n] for n in with_tangent]
        unread = ctx.unread and ctx.unread.of_derivative()
        fn = pushforward(ctx.fn, len(inputs), with_tangent)
        return Recompute.apply(fn, unread, *inputs, *moving_tangents)  # type: ignore[return-value]


def partial_of(fn: Function, inputs: Sequence[Tensor | None], chosen: Sequence[int]) -> Function:
    """`fn` as a function of the chosen inputs, with the others fixed."""

    def partial(*values: Tensor) -> tuple[Tensor, ...]:
        all_inputs = list(inputs)
        for n, value in zip(chosen, values, strict=True):
            all_inputs[n] = value
        return fn(*all_inputs)

    return partial


def pullback(fn: Function, num_inputs: int, wanted: list[int]) -> Function:
    """The function `(*inputs, *cotangents) -> gradients` of the wanted inputs; a cotangent of `None` is zero."""

    def gradients(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        inputs, cotangents = arguments[:num_inputs], arguments[num_inputs:]
        primals = [inputs[n] for n in wanted]
        outputs, pull = torch.func.vjp(partial_of(fn, inputs, wanted), *primals)[:2]
        return pull(tuple(torch.zeros_like(x) if dx is None else dx for x, dx in zip(outputs, cotangents, strict=True)))

    return gradients


def pushforward(fn: Function, num_inputs: int, with_tangent: list[int]) -> Function:
    """The function `(*inputs, *tangents) -> tangents` of the outputs."""
    both = with_pushforward(fn, num_inputs, with_tangent)

    def tangents(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        found = both(*arguments)
        return found[len(found) // 2 :]

    return tangents


def with_pushforward(fn: Function, num_inputs: int, with_tangent: list[int]) -> Function:
    """The function `(*inputs, *tangents) -> (*outputs, *tangents)` of the outputs."""

    def outputs_and_tangents(*arguments: Tensor | None) -> tuple[Tensor, ...]:
        inputs, in_tangents = arguments[:num_inputs], arguments[num_inputs:]
        primals = tuple(inputs[n] for n in with_tangent)
        function = partial_of(fn, inputs, with_tangent)
        if not in_plain_dual_level():
            outputs, tangents = torch.func.jvp(function, primals, in_tangents)[:2]
            return *outputs, *tangents
        # The pullback is linear in the cotangents, so its own pullback is the pushforward.
        outputs, pull = torch.func.vjp(function, *primals)[:2]
        _, push = torch.func.vjp(pull, tuple(torch.zeros_like(x) for x in outputs))[:2]
        return *outputs, *push(in_tangents)[0]

    return outputs_and_tangents


def in_plain_dual_level() -> bool:
    """Whether this is inside `torch.autograd.forward_ad.dual_level()`, where torch.func.jvp cannot open a level."""
    return private_torch.forward_level() >= 0 and not private_torch.in_jvp()


@untraced
def attend(plan: Plan, call: Call, orders_unread: int) -> tuple[Tensor, Tensor]:
    """`out` and `lse` of a call, in the shapes of the operators, differentiable by every transform.

    With 1 as `orders_unread` they are not read themselves, with 2 neither are their first derivatives.
    """
    tensors = call.tensors
    dtype = accumulation_dtype(tensors.q.dtype)
    queries, keys = Side(call, keys=False), Side(call, keys=True)
    shape = shape_of_row_blocks(plan.tile, call, queries, keys)
    parts = [
        (slab, attend_blocks(blocks, shape, dtype, orders_unread))
        for slab, blocks in row_blocks_of_slabs(call, queries, keys, shape)
    ]
    out = assemble([(slab, out) for slab, (out, _) in parts], queries, tensors, tensors.v.shape[-1], 0.0, dtype)
    lse = assemble([(slab, lse) for slab, (_, lse) in parts], queries, tensors, 1, -torch.inf, dtype)
    return out.to(tensors.q.dtype), rows_to_lse(call, lse)


def attend_blocks(
    blocks: Iterable[RowBlock], shape: TileShape, dtype: torch.dtype, orders_unread: int
) -> tuple[Tensor, Tensor]:
    """`out [B, H, Sq, Dv]` and `lse [B, H, Sq, 1]` of a slab."""
    results = [attend_block(block, shape, dtype, orders_unread) for block in blocks]
    if len(results) == 1:
        return results[0]
    out, lse = zip(*results, strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


def attend_block(block: RowBlock, shape: TileShape, dtype: torch.dtype, orders_unread: int) -> tuple[Tensor, Tensor]:
    """`out [B, H, M, Dv]` and `lse [B, H, M, 1]` of a row block."""
    call, slab, rows = block

    def forward(*flat: Tensor | None) -> tuple[Tensor, Tensor]:
        part = call._replace(tensors=Tensors.from_flat(flat))
        bound = slab.bound_to(part)  # do not capture tensors of another transform's level
        return forward_rows(part, bound, shape, Scores(part, bound, dtype), rows)[:2]

    leading = (slab.num_sequences, slab.heads_q.stop - slab.heads_q.start, rows.stop - rows.start)  # B, H, M
    widths = (call.tensors.v.shape[-1], 1)
    unread = Unread(tuple((torch.Size((*leading, n)), dtype) for n in widths), orders_unread)
    return Recompute.apply(forward, unread, *call.tensors.flat())  # type: ignore[return-value]


def assemble(
    parts: list[tuple[Slab, Tensor]], queries: Side, tensors: Tensors, width: int, fill: float, dtype: torch.dtype
) -> Tensor:
    """Assemble the slabs' rows `[B, H, Sq, width]` in the shape of q, out of place, as transforms require."""
    unwritten = queries.buffer(tensors.q, tensors.q.shape[1], width, dtype, fill)
    if not parts:
        return queries.result(unwritten)
    batches = {slab.batch.start: slab for slab, _ in parts}
    sequences = [(slab, torch.cat([x for s, x in parts if s.batch == slab.batch], dim=1)) for slab in batches.values()]
    if queries.dense:
        return torch.cat([x for _, x in sequences])
    tokens = [x.transpose(1, 2).flatten(0, 1) for _, x in sequences]  # [B * Sq, H, width]
    if queries.on_host:
        rest, end, pieces = queries.result(unwritten), 0, []
        for (slab, _), x in zip(sequences, tokens, strict=True):
            first = queries.first(slab.batch.start)
            pieces += [rest[end:first], x]
            end = first + x.shape[0]
        return torch.cat((*pieces, rest[end:]))
    index = []
    for slab, _ in sequences:
        rows = slab.query_rows(unwritten)
        assert isinstance(rows, GatheredRows)
        index.append(rows.index.tokens(slice(0, slab.seqlen_q))[0].flatten())
    return queries.result(unwritten.index_put((torch.cat(index),), torch.cat(tokens)))
