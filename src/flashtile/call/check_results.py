"""Whether what backward gets fits its call. Saved tensors may come back from hooks as others, and programs may call the
operators themselves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import ArgumentError
from .call import DIFFERENTIABLE, Call, Needs, Tangents, differentiable_positions, lse_shape, row_stats_shape
from .check import EXAMPLES, memory, name_of_captured
from .eight_bit import is_eight_bit
from .problem import accumulation_dtype


def check_needs(call: Call, needs: Sequence[bool]) -> Needs:
    """The requested gradients, a bool for each differentiable tensor.

    Raises:
        ArgumentError: they are of another number, or one is requested of an absent tensor, of a tensor of integers, or
            of one that a mask function reads.
    """
    flat, first_of_mask = call.tensors.flat(), len(DIFFERENTIABLE) + call.num_score_tensors
    captured = [name_of_captured(call, n) for n in range(len(call.tensors.score_mod_tensors))]
    names, example = (*DIFFERENTIABLE, *captured), EXAMPLES[call.layout]
    if any(needs) and is_eight_bit(call.tensors.k):
        accepted = "the dtype of q where a gradient is requested; k and v of 8 bits inside `with torch.no_grad():`"
        raise ArgumentError("k", call.tensors.k, accepted, example)
    if len(needs) != len(names):
        raise ArgumentError("needs", list(needs), f"{len(names)} bools, for {', '.join(names)}", example)
    for n, (name, position) in enumerate(zip(names, differentiable_positions(len(flat)), strict=True)):
        x = flat[position]
        if needs[n] and (x is None or not x.is_floating_point() or n >= first_of_mask):
            accepted = (
                f"a tensor of real numbers, as needs[{n}] requests its gradient; needs[{n}]=False of one that is "
                "absent, has integers or belongs to a mask"
            )
            raise ArgumentError(name, x, accepted, example)
    return Needs.from_flat(needs)


def check_tangents(call: Call, moves: Sequence[bool], tangents: Sequence[Tensor]) -> Tangents:
    """Tangents of the inputs that `moves` names, in their order.

    Raises:
        ArgumentError: as `check_needs`, or a tangent has not its input's shape, dtype and device, or none is given.
    """
    places, flat, found = check_needs(call, moves).flat(), call.tensors.flat(), iter(tangents)
    if sum(places) != len(tangents) or not tangents:
        accepted = f"a tangent for each input that moves, one at least; moves={list(moves)}"
        raise ArgumentError("tangents", list(tangents), accepted, EXAMPLES[call.layout])
    given = [next(found) if moving else None for moving in places]
    for n, (dx, position) in enumerate(zip(given, differentiable_positions(len(flat)), strict=True)):
        x = flat[position]
        if dx is None or x is None:
            continue
        if dx.shape != x.shape or dx.dtype != x.dtype or dx.device != x.device or dx.layout is not torch.strided:
            accepted = f"shape {list(x.shape)}, dtype {x.dtype}, on {x.device}, as the input"
            raise ArgumentError(f"tangents[{sum(places[:n])}]", dx, accepted, EXAMPLES[call.layout])
    return Tangents.from_flat(given)


def check_results(call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> None:
    """Shapes, dtypes, devices and memory of `out`, `lse` and their gradients. Nothing is read. `lse` may lack the
    residual that its call keeps.

    Raises:
        ArgumentError: one of them differs from the call's results.
    """
    t = call.tensors
    memory({"out": out, "lse": lse, "dout": dout, "dlse": dlse}, call.layout)
    of_out = (*t.q.shape[:-1], t.v.shape[-1]), t.q.dtype
    of_lse = lse_shape(t.q), accumulation_dtype(t.q.dtype)
    of_row_stats = of_lse if lse.dim() < t.q.dim() else (row_stats_shape(call), of_lse[1])
    for name, x, (shape, dtype) in (
        ("out", out, of_out),
        ("lse", lse, of_row_stats),
        ("dout", dout, of_out),
        ("dlse", dlse, of_lse),
    ):
        if x is None:
            continue
        same = x.shape == shape and x.dtype == dtype and x.device == t.q.device and x.layout is torch.strided
        if not same:
            accepted = (
                f"shape {list(shape)}, dtype {dtype}, on {t.q.device}, as in forward, also after hooks of "
                "torch.autograd.graph.saved_tensors_hooks"
            )
            raise ArgumentError(name, x, accepted, EXAMPLES[call.layout])
