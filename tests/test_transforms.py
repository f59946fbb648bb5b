"""torch.func and torch.autograd beyond one backward: right numbers from every transform, never a missing one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import offsets, tile_size
from torch import Tensor

import flashtile

B, HQ, HKV, SQ, SK, D = 2, 2, 1, 5, 7, 3


def inputs(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, HQ, SQ, D), (B, HKV, SK, D), (B, HKV, SK, D))
    return tuple(torch.randn((*lead, *shape), generator=generator, dtype=torch.float64) for shape in shapes)  # type: ignore[return-value]


def fused(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    with tile_size(2, 4):
        return flashtile.attention(q, k, v, causal=True, softcap=3.0, return_lse=True)


def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The same call from its formula, in operations that every transform knows."""
    k, v = (x.expand(*q.shape[:-2], *x.shape[-2:]) for x in (k, v))
    s = 3.0 * torch.tanh(q @ k.mT * D**-0.5 / 3.0)
    visible = torch.arange(SK) <= torch.arange(SQ)[:, None] + SK - SQ
    s = torch.where(visible, s, -torch.inf)
    return s.softmax(-1) @ v, s.logsumexp(-1)


def loss(attention: Callable[..., Any]) -> Callable[..., Tensor]:
    def of_inputs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v)
        return out.square().sum() + (lse * out.sum(-1)).sum()

    return of_inputs


KEYS = inputs()[1:]
TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "grad": lambda f: torch.func.grad(loss(f), argnums=(0, 1, 2))(*inputs()),
    "vjp": lambda f: torch.func.vjp(f, *inputs())[1](f(*inputs())),
    "jvp": lambda f: torch.func.jvp(f, inputs(), tuple(x.sin() for x in inputs())),
    "vmap": lambda f: torch.func.vmap(f)(*inputs(3)),
    "vmap of one input": lambda f: torch.func.vmap(f, in_dims=(1, None, None))(
        inputs(3)[0].movedim(0, 1), *inputs()[1:]
    ),
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(loss(f), argnums=(0, 1, 2)))(*inputs(3)),
    "jvp of grad": lambda f: torch.func.jvp(torch.func.grad(loss(f)), inputs(), tuple(x.cos() for x in inputs())),
    "grad of grad": lambda f: torch.func.grad(
        lambda *x: torch.func.grad(loss(f))(*x).square().sum(), argnums=(0, 1, 2)
    )(*inputs()),
    "jacrev": lambda f: torch.func.jacrev(lambda q: f(q, *KEYS)[0].sum((0, 1)))(inputs()[0]),
    "jacfwd": lambda f: torch.func.jacfwd(lambda q: f(q, *KEYS)[0].sum((0, 1)))(inputs()[0]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transform(name: str) -> None:
    found, expected = (torch.utils._pytree.tree_leaves(TRANSFORMS[name](f)) for f in (fused, formula))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_forward_mode_of_autograd() -> None:
    def derivative(f: Callable[..., Any]) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(x, x.cos()) for x in inputs()]
            return torch.autograd.forward_ad.unpack_dual(f(*duals)[0]).tangent

    torch.testing.assert_close(derivative(fused), derivative(formula))


def test_double_backward() -> None:
    def second(f: Callable[..., Any]) -> tuple[Tensor, ...]:
        leaves = [x.requires_grad_() for x in inputs()]
        first = torch.autograd.grad(loss(f)(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), leaves)

    for x, y in zip(second(fused), second(formula), strict=True):
        torch.testing.assert_close(x, y)


def test_gradgradcheck_of_packed_sequences_with_features() -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = ((5, 2, 2), (6, 1, 2), (6, 1, 2), (1, 2, 1, 4), (2,))
    leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Tensor:
        arguments = {
            "bias": bias,
            "sinks": sinks,
            "max_seqlen_q": 3,
            "max_seqlen_k": 4,
            "dropout_p": 0.2,
            "dropout_seed": 1,
        }
        return flashtile.attention_varlen(q, k, v, offsets(3, 2), offsets(4, 2), **arguments)

    with tile_size(2, 2):
        assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)
        assert torch.autograd.gradcheck(call, leaves, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
