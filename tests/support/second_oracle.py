"""Second derivatives in float64 from the formulas of docs/design/exactness.md, and sums of absolute terms."""

from typing import Any

import torch
from torch import Tensor

import flashtile

Triple = tuple[Tensor, Tensor, Tensor]
ROUNDINGS = {torch.float32: 64, torch.float16: 8, torch.bfloat16: 8}  # of a term, in units of the dtype


def second_derivative(
    inputs: Triple, along: Triple, dout: Tensor, bias: Tensor, sinks: Tensor | None = None, keep: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """The second derivative by q, k and v of dense inputs `[B, H, S, D]` with as many heads, and for each element the
    sum of its terms' absolute values. `bias` has what is added to scores, -inf for hidden pairs; `keep` is 0 or what
    dropout multiplies by.
    """
    q, k, v, tq, tk, tv, dout, bias = (x.double() for x in (*inputs, *along, dout, bias))
    scale, keep = q.shape[-1] ** -0.5, torch.ones_like(bias) if keep is None else keep.double()
    s = scale * q @ k.mT + bias
    t = scale * (tq @ k.mT + q @ tk.mT)
    extra = [] if sinks is None else [sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)]
    lse = torch.cat([s, *extra], dim=-1).logsumexp(dim=-1, keepdim=True)
    p = torch.where(s == -torch.inf, 0, (s - lse).exp())
    out = (keep * p) @ v
    T = (p * t).sum(dim=-1, keepdim=True)
    tout = (keep * p) @ tv + (keep * p * (t - T)) @ v
    delta, product = ((dout * x).sum(dim=-1, keepdim=True) for x in (out, tout))
    abs_delta, abs_product = ((dout * x).abs().sum(dim=-1, keepdim=True) for x in (out, tout))
    dp, u = keep * (dout @ v.mT), keep * (dout @ tv.mT)
    r = p * ((dp - delta) * (t - T) + u - product)
    abs_r = p * ((dp.abs() + abs_delta) * (t.abs() + T.abs()) + u.abs() + abs_product)
    ds, abs_ds = p * (dp - delta), p * (dp.abs() + abs_delta)
    w, abs_w = keep * p * (t - T), keep * p * (t.abs() + T.abs())
    return [
        (scale * (r @ k + ds @ tk), scale * (abs_r @ k.abs() + abs_ds @ tk.abs())),
        (scale * (r.mT @ q + ds.mT @ tq), scale * (abs_r.mT @ q.abs() + abs_ds.mT @ tq.abs())),
        (w.mT @ dout, abs_w.mT @ dout.abs()),
    ]


def by_autograd(
    inputs: Triple, along: Triple, dout: Tensor, backend: str, **arguments: Any
) -> tuple[list[Tensor], set[tuple[str, str]]]:
    """The same by two backward passes of `flashtile.attention`, and which passes ran in which backends."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    with flashtile.calls() as counts:
        out = flashtile.attention(*leaves, backend=backend, **arguments)
        first = torch.autograd.grad(out, leaves, dout, create_graph=True)
        found = torch.autograd.grad(first, leaves, along)
    return list(found), {(row.direction, row.backend) for row in counts.rows}


def assert_close(found: list[Tensor], expected: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    for name, x, (right, terms) in zip("qkv", found, expected, strict=True):
        bound = eps * (ROUNDINGS[dtype] * terms + right.abs()) + torch.finfo(dtype).tiny
        excess = ((x.double().cpu() - right.cpu()).abs() / bound.cpu()).max()
        assert excess <= 1, f"d{name}: {excess:.3g} times the bound"
