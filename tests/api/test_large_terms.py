"""Rows whose scores all have a large term: only differences of scores count."""

import pytest
import torch
from large_terms import ROWS, TERMS, compute, expected, failures, inputs
from torch import Tensor

import flashtile
from flashtile import attention

BACKENDS = ["cpu", "tiled", "reference"]
FORMS = [*(("bias", x) for x in BACKENDS), ("split", "cpu"), ("score_mod", "cpu"), ("score_mod", "tiled")]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize(("form", "backend"), FORMS)
def test_results(form: str, backend: str, term: float) -> None:
    assert failures(form, backend, *inputs(term)) == []


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
