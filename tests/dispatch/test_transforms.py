"""torch.func.grad and its relatives, hooks and modes around calls. vmap, traced programs, compiled functions, forward
mode and second derivatives have files of their own.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from formula import EXAMPLES, HQ, SQ, D, dense, everything, loss, randn
from torch import Tensor
from torch.func import grad_and_value, jacrev, vjp
from transformed import assert_close, formula, fused, gradient, k, leaf, q, v, value

import flashtile


@pytest.mark.parametrize("name", EXAMPLES)
def test_grad(name: str) -> None:
    example = EXAMPLES[name]()
    argnums = tuple(range(len(example.tensors)))
    found, expected = (
        grad_and_value(loss(f), argnums=argnums)(*example.tensors) for f in (example.fused, example.formula)
    )
    assert_close(found, expected)


def test_vjp_is_called_twice() -> None:
    """A pullback keeps what it needs."""
    example = everything()
    pulls = [vjp(f, *example.tensors)[1] for f in (example.fused, example.formula)]
    for seed in (5, 6):
        cotangents = tuple(randn(*x.shape, seed=seed) for x in example.formula(*example.tensors))
        assert_close(pulls[0](cotangents), pulls[1](cotangents))


def test_jacrev() -> None:
    example = dense({"causal": True}, seqlen_q=2, seqlen_k=3)
    found, expected = (jacrev(f, argnums=(0, 1))(*example.tensors) for f in (example.fused, example.formula))
    assert_close(found, expected)


def test_hooks_of_saved_tensors() -> None:
    def loss_of(q: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.numpy(), torch.from_numpy):
            return value(fused)(q)

    torch.testing.assert_close(gradient(loss_of, q), gradient(value(formula), q))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_derivatives(mode: Callable[[], Any]) -> None:
    with mode():
        out = fused(leaf(q))
    assert out.grad_fn is None
    torch.testing.assert_close(out.clone(), formula(q))


def test_meta_tensors_have_shapes_alone() -> None:
    out, lse = flashtile.attention(*(x.to("meta") for x in (q, k, v)), return_lse=True)
    assert out.device == lse.device == torch.device("meta")
    assert (out.shape, lse.shape) == ((*q.shape[:3], v.shape[3]), q.shape[:3])


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_functionalize(name: str) -> None:
    """With grad mode on, and gradients of torch.autograd through it."""
    example = EXAMPLES[name]()
    results = []
    for f in (torch.func.functionalize(example.fused), example.fused):
        leaves = [leaf(x) for x in example.tensors]
        outputs = f(*leaves)
        results.append([outputs, torch.autograd.grad(sum(torch.sin(x).sum() for x in outputs), leaves)])
    assert_close(*results)


@pytest.mark.parametrize("first", [torch.func.grad, torch.func.functionalize])
def test_functionalize_around_a_transform_is_refused(first: Any) -> None:
    second = torch.func.grad if first is torch.func.functionalize else torch.func.functionalize
    x = randn(1, HQ, SQ, D)
    with pytest.raises(RuntimeError, match="Functionalize"):
        first(second(lambda x: flashtile.attention(x, x, x).sum()))(x)
