"""An attention of q and a bias, its formula, and derivatives of both by torch.autograd, for tests of transforms."""

from collections.abc import Callable
from typing import Any

import torch
from duals import assert_close
from formula import HQ, SK, SQ, B, D, dense, dense_formula, randn
from torch import Tensor
from torch.autograd import forward_ad

import flashtile

TREE_LEAVES = torch.utils._pytree.tree_leaves


def several(x: Tensor, count: int = 3) -> Tensor:
    """`x` and others like it, in a new first dimension."""
    return torch.stack([x, *(randn(*x.shape, seed=10 + n).to(x.dtype) for n in range(count - 1))])


def value(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *x: torch.sin(f(*x)).sum()


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """By torch.autograd."""
    x = leaf(x)
    return torch.autograd.grad(function(x), x)[0]


def second_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = leaf(x)
    (first,) = torch.autograd.grad(function(x), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


FACTOR = randn(HQ, seed=9)


def tangent_of_dual(function: Callable[[Tensor], Tensor], x: Tensor, dx: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, dx))).tangent
        assert tangent is not None
        return tangent


def right_or_error(run: Callable[[], Any], expected: Any) -> bool:
    """Whether `run` gives what is expected; it may also raise an error of ours or of PyTorch's, but nothing else."""
    assert all(x.any() for x in TREE_LEAVES(expected))
    try:
        found = run()
    except (flashtile.AttentionError, RuntimeError, NotImplementedError):  # Dynamo's are RuntimeErrors
        return False
    assert_close(found, expected)
    return True


q, k, v = dense().tensors
BIAS, DQ, ONE = randn(1, HQ, 1, SK), randn(B, HQ, SQ, D, seed=9), torch.ones((), dtype=torch.float64)


def fused(q: Tensor, bias: Tensor = BIAS) -> Tensor:
    return flashtile.attention(q, k[: q.shape[0]], v[: q.shape[0]], causal=True, bias=bias, backend="tiled")


def formula(q: Tensor, bias: Tensor = BIAS) -> Tensor:
    return dense_formula(q, k[: q.shape[0]], v[: q.shape[0]], causal=True, bias=bias)[0]
