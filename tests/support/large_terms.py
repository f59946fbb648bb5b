"""Calls in which a large term is in all scores of some rows, as of a padded query in an additive mask."""

from typing import Any

import torch
from torch import Tensor

import flashtile
from flashtile import attention

TERMS = [-1e4, -1e6, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, 1e6]
ROWS = slice(1, 3)  # with the term on every key
NAMES = ("out", "dq", "dk", "dv", "dbias")


def inputs(
    term: float,
    rows: int = 20,
    keys: int = 600,
    width: int = 16,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> list[Tensor]:
    """q, k, v, bias and dout; `dtypes` are that of q and that of the bias. Products of q and k are exact in float32, so
    that each score is rounded once.
    """
    dtype, bias_dtype = dtypes
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-4, 5, (1, 2, n, width), generator=generator).to(dtype) / 4 for n in (rows, keys))
    v, dout = (torch.randn(1, 2, n, width, generator=generator).to(dtype) for n in (keys, rows))
    bias = torch.randint(-8, 9, (1, 1, rows, keys), generator=generator) / 4
    bias[..., ROWS, :] = term
    return [q, k, v, bias.to(bias_dtype), dout]


def expected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """`out` and gradients in float64, of scores rounded to float32."""
    leaves = [x.double().requires_grad_() for x in (q, k, v, bias)]
    s = leaves[0] @ leaves[1].mT / 4 + leaves[3]
    s = s + (s.float().double() - s).detach()
    out = s.softmax(-1) @ leaves[2]
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def compute(form: str, backend: str, *tensors: Tensor, needs_bias: bool = True) -> tuple[Tensor, ...]:
    """`out` and the gradients; that of the bias if it is needed."""
    *leaves, bias = (x.clone().requires_grad_() for x in tensors[:4])
    arguments: dict[str, Any] = {"num_splits": 2} if form == "split" else {}
    bias.requires_grad_(needs_bias)
    if form == "score_mod":
        arguments["score_mod"] = flashtile.ScoreMod(lambda s, b, h, i, j, x: s + x[0, 0, i, j], (bias,))
    else:
        arguments["bias"] = bias
    out = attention(*leaves, **arguments, backend=backend, scale=0.25)
    return out.detach(), *torch.autograd.grad(out, (*leaves, bias) if needs_bias else leaves, tensors[4])


def failures(form: str, backend: str, *tensors: Tensor, needs_bias: bool = True) -> list[str]:
    """The results whose largest error is above 64 units of float32, or 4 of q in 16 bits, of the largest element."""
    eps = torch.finfo(tensors[0].dtype).eps
    bound = 64 * eps if tensors[0].dtype is torch.float32 else 4 * eps
    results = zip(NAMES, compute(form, backend, *tensors, needs_bias=needs_bias), expected(*tensors))  # noqa: B905
    errors = {name: float((x - y).abs().max() / y.abs().max()) for name, x, y in results}
    return [f"{name}: {error:.1e}" for name, error in errors.items() if not error <= bound]
