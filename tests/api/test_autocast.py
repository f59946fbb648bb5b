"""torch.autocast and torch.utils.checkpoint around a call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import BACKENDS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import flashtile


def dense_leaves() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 12, 8), (2, 2, 20, 8), (2, 2, 20, 8))
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def results(function: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
    """Results of a function, and the gradients of its leaves."""
    out = function(*leaves)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_equals_explicit_casts(dtype: torch.dtype, backend: str) -> None:
    """q, k and v are cast, as in scaled_dot_product_attention; the products inside keep the accumulation dtype."""
    leaves = [*dense_leaves(), torch.randn(1, 4, 12, 20).requires_grad_()]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, bias=bias, backend=backend)

    def explicit(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return call(q.to(dtype), k.to(dtype), v.to(dtype), bias)

    def under_autocast(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return call(*tensors)

    expected = results(explicit, *leaves)
    for _ in range(3):  # checked, recorded, replayed
        assert_same(results(under_autocast, *leaves), expected)
    compiled = torch.compile(under_autocast, fullgraph=True, backend="aot_eager")
    assert_same(results(compiled, *leaves), expected)


def test_autocast_around_backward() -> None:
    """Backward under autocast is the same backward."""
    leaves = dense_leaves()
    out = flashtile.attention(*leaves)
    expected = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(out.sum(), leaves)
    assert_same(list(found), list(expected))


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = (x.detach().double() for x in dense_leaves())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flashtile.attention(q, k, v), flashtile.attention(q, k, v))
        assert flashtile.attention(q, k, v).dtype is torch.float64


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_draws_the_same_dropout_again(use_reentrant: bool) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, dropout_p=0.4)

    torch.manual_seed(7)
    leaves = dense_leaves()
    flat = call(*leaves)
    flat.square().sum().backward()
    expected = [x.grad for x in leaves]
    torch.manual_seed(7)
    leaves = dense_leaves()
    out = checkpoint(call, *leaves, use_reentrant=use_reentrant)
    out.square().sum().backward()
    assert torch.equal(out, flat)
    assert_same([x.grad for x in leaves], expected)
