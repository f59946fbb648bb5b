"""Second derivatives in float64 from the formulas of docs/design/exactness.md, and sums of absolute terms."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashtile

Triple = tuple[Tensor, Tensor, Tensor]
TERMS, SUMS = 8, 8  # roundings of a term in 16 bits, and of a sum in float32: in units of eps


class Exact(NamedTuple):
    """A second derivative, and for each element the sums of absolute values: of its terms, and of what they sum up."""

    value: Tensor
    terms: Tensor
    sums: Tensor


def second_derivative(
    inputs: Triple, along: Triple, dout: Tensor, bias: Tensor, sinks: Tensor | None = None, keep: Tensor | None = None,
    softcap: float = float("inf"),
) -> list[Exact]:  # fmt: skip
    """The second derivative by q, k and v of dense inputs `[B, H, S, D]` with as many heads. `bias` has what is added
    to scores, -inf for hidden pairs; `keep` is 0 or what dropout multiplies by.
    """
    q, k, v, tq, tk, tv, dout, bias = (x.double() for x in (*inputs, *along, dout, bias))
    scale, keep = q.shape[-1] ** -0.5, torch.ones_like(bias) if keep is None else keep.double()
    s, t = scale * q @ k.mT, scale * (tq @ k.mT + q @ tk.mT)
    slope, bend = torch.ones_like(s), torch.zeros_like(s)  # of the softcap: its derivative, and that over itself
    if softcap < float("inf"):
        s, tanh = softcap * (s / softcap).tanh(), (s / softcap).tanh()
        slope, bend = 1 - tanh**2, -2 * tanh / softcap
    s, t = s + bias, slope * t
    extra = [] if sinks is None else [sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)]
    lse = torch.cat([s, *extra], dim=-1).logsumexp(dim=-1, keepdim=True)
    p = torch.where(s == -torch.inf, 0, (s - lse).exp())
    out = (keep * p) @ v
    T = (p * t).sum(dim=-1, keepdim=True)
    tout = (keep * p) @ tv + (keep * p * (t - T)) @ v
    delta, product = ((dout * x).sum(dim=-1, keepdim=True) for x in (out, tout))
    dp, u = keep * (dout @ v.mT), keep * (dout @ tv.mT)
    r, ds, w = p * ((dp - delta) * (t - T) + u - product), p * (dp - delta), keep * p * (t - T)
    r, ds = slope * r + bend * ds * t, slope * ds

    def absolute(weights: Tensor, dp: Tensor, u: Tensor, t: Tensor, of_rows: tuple[Tensor, ...]) -> list[Tensor]:
        delta, product, T = of_rows
        r, ds = weights * ((dp + delta) * (t + T) + u + product), weights * (dp + delta)
        r, ds = slope * r + bend.abs() * ds * t, slope * ds
        w = keep * weights * (t + T)
        q_side = scale * (r @ k.abs() + ds @ tk.abs())
        return [q_side, scale * (r.mT @ q.abs() + ds.mT @ tq.abs()), w.mT @ dout.abs()]

    of_rows = tuple((dout * x).abs().sum(dim=-1, keepdim=True) for x in (out, tout))
    terms = absolute(p, dp.abs(), u.abs(), t.abs(), (*of_rows, T.abs()))
    scores, tangents = scale * q.abs() @ k.abs().mT, scale * (tq.abs() @ k.abs().mT + q.abs() @ tk.abs().mT)
    weights = p * (1 + scores)  # an error of a score is one of its probability
    mean = (p * tangents).sum(dim=-1, keepdim=True)
    sums = absolute(
        weights, keep * (dout.abs() @ v.abs().mT), keep * (dout.abs() @ tv.abs().mT), tangents, (*of_rows, mean)
    )
    values = (scale * (r @ k + ds @ tk), scale * (r.mT @ q + ds.mT @ tq), w.mT @ dout)
    return [Exact(*x) for x in zip(values, terms, sums, strict=True)]


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


def assert_close(found: list[Tensor], expected: list[Exact], dtype: torch.dtype) -> None:
    eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    for name, x, (right, terms, sums) in zip("qkv", found, expected, strict=True):
        bound = eps * right.abs() + SUMS * single * sums + torch.finfo(dtype).tiny
        if dtype is not torch.float32:
            bound = bound + TERMS * eps * terms
        excess = ((x.double().cpu() - right.cpu()).abs() / bound.cpu()).max()
        assert excess <= 1, f"d{name}: {excess:.3g} times the bound"
