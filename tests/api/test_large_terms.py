"""Rows whose scores all have a large term, as of a padded query in an additive mask: only differences count."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import attention

TERMS = [-1e4, -1e6, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min, 1e6]
ROWS = slice(1, 3)  # with the term on every key
BACKENDS = ["cpu", "tiled", "reference"]
FORMS = [*(("bias", x) for x in BACKENDS), ("split", "cpu"), ("score_mod", "cpu"), ("score_mod", "tiled")]
EPS = torch.finfo(torch.float32).eps


def inputs(term: float, rows: int = 20, keys: int = 600) -> list[Tensor]:
    """q, k, v, bias and dout. Products of q and k are exact in float32, so that each score is rounded once."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randint(-4, 5, (1, 2, n, 16), generator=generator) / 4 for n in (rows, keys))
    v, dout = (torch.randn(1, 2, n, 16, generator=generator) for n in (keys, rows))
    bias = torch.randint(-8, 9, (1, 1, rows, keys), generator=generator) / 4
    bias[..., ROWS, :] = term
    return [q, k, v, bias, dout]


def expected(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """`out` and gradients in float64, of scores rounded to float32."""
    leaves = [x.double().requires_grad_() for x in (q, k, v, bias)]
    s = leaves[0] @ leaves[1].mT / 4 + leaves[3]
    s = s + (s.float().double() - s).detach()
    out = s.softmax(-1) @ leaves[2]
    return out.detach(), *torch.autograd.grad(out, leaves, dout.double())


def compute(form: str, backend: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`out` and the gradients."""
    *leaves, bias = (x.clone().requires_grad_() for x in tensors[:4])
    arguments: dict[str, Any] = {"num_splits": 2} if form == "split" else {}
    if form == "score_mod":
        arguments["score_mod"] = flashtile.ScoreMod(lambda s, b, h, i, j, x: s + x[0, 0, i, j], (bias,))
    else:
        arguments["bias"] = bias
    out = attention(*leaves, **arguments, backend=backend, scale=0.25)
    return out.detach(), *torch.autograd.grad(out, (*leaves, bias), tensors[4])


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("form", "backend"), FORMS)
def test_results(form: str, backend: str, term: float) -> None:
    given = inputs(term)
    names, results = ("out", "dq", "dk", "dv", "dbias"), compute(form, backend, *given)
    for name, x, y in zip(names, results, expected(*given), strict=True):
        assert (x - y).abs().max() <= 64 * EPS * y.abs().max(), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_by_all_ways(backend: str) -> None:
    """Repeated and compiled calls, those with vmap, and those of tokens."""
    given = inputs(-1e9, rows=5, keys=7)
    results = compute("bias", backend, *given)
    for _ in range(3):
        assert all(torch.equal(x, y) for x, y in zip(compute("bias", backend, *given), results, strict=True))

    def call(*tensors: Tensor) -> Tensor:
        return attention(*tensors[:3], bias=tensors[3], scale=0.25, backend=backend)  # type: ignore[no-any-return]

    compiled = torch.compile(call, backend="aot_eager")
    leaves = [x.clone().requires_grad_() for x in given[:4]]
    grads = torch.autograd.grad(compiled(*leaves), leaves, given[4])
    assert all(torch.equal(x, y) for x, y in zip(grads, results[1:], strict=True))

    def loss(*tensors: Tensor) -> Tensor:
        out, lse = attention(*tensors[:3], bias=tensors[3], scale=0.25, backend=backend, return_lse=True)
        return (out * tensors[4]).sum() + 0 * lse.clamp(-1, 1).sum()

    batched = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2, 3)))(*(x[None] for x in given))
    for x, y in zip(batched, results[1:], strict=True):
        torch.testing.assert_close(x[0], y)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_packed_rows(backend: str) -> None:
    given = inputs(-1e9, rows=5, keys=7)
    q, k, v, bias, dout = given
    tokens = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    bounds = [torch.tensor((0, n), dtype=torch.int32) for n in (5, 7)]
    out, lse = flashtile.attention_varlen(
        *tokens, *bounds, max_seqlen_q=5, max_seqlen_k=7, bias=bias, scale=0.25, backend=backend, return_lse=True
    )
    assert lse.shape == (2, 5)
    grads = torch.autograd.grad(out, tokens, dout[0].transpose(0, 1))
    for x, y in zip(grads, expected(*given)[1:4], strict=True):
        torch.testing.assert_close(x.transpose(0, 1)[None], y.float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sink_as_large_as_the_term(backend: str) -> None:
    """A sink is one more key, whose score is the term here."""
    q, k, v, bias, dout = inputs(-1e9, rows=5, keys=7)
    sinks = torch.full((2,), -1e9, requires_grad=True)
    out = attention(q, k, v, bias=bias, sinks=sinks, scale=0.25, backend=backend)
    torch.testing.assert_close(out[0, :, 1], v.sum(2)[0] / 8)
    (dsinks,) = torch.autograd.grad(out, sinks, dout)
    torch.testing.assert_close(dsinks, -(out * dout)[0, :, ROWS].sum((1, 2)).detach() / 8)
