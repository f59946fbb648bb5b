"""Forward mode inside and around other transforms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from duals import assert_close, tangents_of_duals
from formula import EXAMPLES, FP64, Example, Outputs, dense, dense_formula, everything, loss, randn
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import flashtile


def velocity_loss(attention: Callable[..., Outputs], x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """MeanFlow's loss: a network u whose target contains its own derivative along (v, 0, 1), without a gradient
    through that (Geng et al., "Mean flows for one-step generative modeling", 2025, equation 11).
    """

    def network(z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        q, k, v = (z @ w + torch.stack((r, t)).sum() * torch.sin(w.sum(0))).unflatten(-1, (2, 3, 2)).unbind(-2)
        q, k, v = (y.transpose(-3, -2) for y in (q, k, v))
        return attention(q, k, v)[0].transpose(-3, -2).flatten(-2)

    r, t = torch.tensor(0.2, dtype=FP64), torch.tensor(0.7, dtype=FP64)
    u, du = jvp(network, (x, r, t), (target, torch.zeros_like(r), torch.ones_like(t)))
    return (u - (target - (t - r) * du).detach()).square().mean() + du.square().mean()


def flow_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return randn(2, 6, 4), randn(4, 12), randn(2, 6, 4, seed=1)


def example_attention() -> tuple[Callable[..., Outputs], Callable[..., Outputs]]:
    example = dense({"softcap": 2.0})
    return example.fused, example.formula


LOSSES: dict[str, Callable[[Callable[..., Outputs]], Any]] = {
    "grad of jvp": lambda f: grad(lambda w: velocity_loss(f, flow_inputs()[0], w, flow_inputs()[2]))(flow_inputs()[1]),
    "backward of jvp": lambda f: of_backward(lambda w: velocity_loss(f, flow_inputs()[0], w, flow_inputs()[2])),
    "vmap of grad of jvp": lambda f: vmap(
        grad(lambda w, x, v: velocity_loss(f, x[None], w, v[None])), in_dims=(None, 0, 0)
    )(flow_inputs()[1], flow_inputs()[0], flow_inputs()[2]),
    "grad of vmap of jvp": lambda f: grad(
        lambda w: vmap(lambda x, v: velocity_loss(f, x[None], w, v[None]))(flow_inputs()[0], flow_inputs()[2]).sum()
    )(flow_inputs()[1]),
    "grad of jvp, checkpointed": lambda f: of_backward(
        lambda w: torch.utils.checkpoint.checkpoint(
            lambda w: velocity_loss(f, flow_inputs()[0], w, flow_inputs()[2]), w, use_reentrant=False
        )
    ),
}


def of_backward(function: Callable[[Tensor], Tensor]) -> Tensor | None:
    w = flow_inputs()[1].requires_grad_()
    function(w).backward()
    return w.grad


@pytest.mark.parametrize("name", LOSSES)
def test_loss_that_needs_a_jvp(name: str) -> None:
    found, expected = (LOSSES[name](f) for f in example_attention())
    assert expected.any()
    assert_close(found, expected)


@pytest.mark.parametrize("make", [everything, EXAMPLES["packed with everything"]], ids=["dense", "packed"])
def test_gradient_of_the_tangents_with_every_feature(make: Callable[[], Example]) -> None:
    """Reverse over forward, with respect to every input and every tangent."""
    example = make()

    def tangents(function: Callable[..., Outputs], *given: Tensor) -> Tensor:
        half = len(example.tensors)
        out, lse = jvp(function, given[:half], given[half:])[1]
        return out.square().sum() + torch.sin(lse).sum()

    given = (*example.tensors, *example.tangents())
    argnums = tuple(range(len(given)))
    found, expected = (
        grad(lambda *x: tangents(f, *x), argnums=argnums)(*given)  # noqa: B023
        for f in (example.fused, example.formula)
    )
    assert_close(found, expected)


def test_of_a_module() -> None:
    """The usual way to a JVP of a network: functional_call, here through a projection and self-attention."""
    projection = torch.nn.Linear(4, 12, dtype=FP64)
    parameters = {name: x.detach() for name, x in projection.named_parameters()}
    x, tangent = randn(2, 5, 4), randn(2, 5, 4, seed=1)

    def network(attention: Callable[..., Any], parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = functional_call(projection, parameters, (x,)).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return attention(q, k, v, causal=True)

    def tangent_of(attention: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda p: jvp(lambda x: network(attention, p, x), (x,), (tangent,))[1].square().sum()

    found, expected = (
        grad(tangent_of(f))(parameters) for f in (flashtile.attention, lambda *x, **k: dense_formula(*x, **k)[0])
    )
    assert_close(found, expected)


NESTED: dict[str, Callable[[Callable[..., Outputs], Example], Any]] = {
    "jvp of jvp": lambda f, e: jvp(lambda *x: jvp(f, x, e.tangents())[1], e.tensors, e.tangents(2))[1],
    "jvp of jvp of jvp": lambda f, e: jvp(
        lambda *x: jvp(lambda *y: jvp(f, y, e.tangents())[1], x, e.tangents(2))[1], e.tensors, e.tangents(3)
    )[1],
    "jvp of vmap": lambda f, e: jvp(vmap(f), *(tuple(torch.stack((x, 2 * x)) for x in y) for y in both(e))),
    "vmap of jvp": lambda f, e: vmap(lambda *dx: jvp(f, e.tensors, dx)[1])(
        *(torch.stack((x, 2 * x)) for x in e.tangents())
    ),
    "jvp of a pullback": lambda f, e: jvp(vjp(f, *e.tensors)[1], *cotangents(e))[1],
    "linearize": lambda f, e: linearize(f, *e.tensors)[1](*e.tangents()),
    "jacfwd": lambda f, e: jacfwd(lambda *x: f(*x)[0].sum((0, 1)), argnums=(0, 2))(*e.tensors),
    "jacfwd of jacrev": lambda f, e: jacfwd(jacrev(lambda q: loss(f)(q, *e.tensors[1:])))(e.tensors[0][:, :, :2]),
    "vmap of hessian": lambda f, e: vmap(
        hessian(lambda x: loss(f)(x[None], *(y[:1] for y in e.tensors[1:3]), e.tensors[3]))
    )(e.tensors[0][:, :, :2]),
    "inside no_grad": lambda f, e: torch.no_grad()(lambda: jvp(f, e.tensors, e.tangents())[1])(),
    "duals inside no_grad": lambda f, e: torch.no_grad()(lambda: tangents_of_duals(f, e.tensors, e.tangents()))(),
    "torch.autograd.functional.jvp": lambda f, e: torch.autograd.functional.jvp(f, e.tensors, e.tangents())[1],
    "forward-mode jacobian": lambda f, e: torch.autograd.functional.jacobian(
        lambda q: f(q, *e.tensors[1:])[0].sum((0, 1)), e.tensors[0], strategy="forward-mode", vectorize=True
    ),
}


def both(example: Example) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return example.tensors, example.tangents()


def cotangents(example: Example) -> tuple[Outputs, Outputs]:
    """`out` and `lse`, and their tangents."""
    first, second = (tuple(randn(*x.shape, seed=n) for x in example.formula(*example.tensors)) for n in (5, 6))
    return (first,), (second,)  # type: ignore[return-value]


@pytest.mark.parametrize("name", NESTED)
def test_nested(name: str) -> None:
    sizes: dict[str, Any] = {"batch": 1, "heads": (2, 1)} if name == "linearize" else {}  # which traces each operation
    example = dense({"causal": True}, **sizes, sinks=randn(*sizes.get("heads", (4, 2))[:1]))
    found, expected = (NESTED[name](f, example) for f in (example.fused, example.formula))
    assert all(x.any() for x in torch.utils._pytree.tree_leaves(expected))
    assert_close(found, expected)


@pytest.mark.parametrize("how", ["jvp", "jvp of grad", "linearize", "duals"])
def test_inference_mode(how: str) -> None:
    """Right where PyTorch keeps tangents; where it loses those of a plain product too, an error."""
    example = dense({"causal": True}, batch=1, heads=(2, 1))
    q, dq = example.tensors[0], example.tangents()[0]

    def derivative(f: Callable[[Tensor], Tensor]) -> Tensor | None:
        if how == "duals":
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(f(forward_ad.make_dual(q, dq))).tangent
        if how == "linearize":
            return linearize(f, q)[1](dq)
        return jvp(grad(lambda q: f(q).square().sum()) if how == "jvp of grad" else f, (q,), (dq,))[1]

    def of_queries(f: Callable[..., Outputs]) -> Callable[[Tensor], Tensor]:
        return lambda q: f(q, *example.tensors[1:])[0]

    expected = derivative(of_queries(example.formula))
    with torch.inference_mode():
        product = derivative(lambda q: q * q)
        if product is not None and product.any():
            assert_close(derivative(of_queries(example.fused)), expected)
        else:
            with pytest.raises(flashtile.AttentionError, match="inference mode"):
                derivative(of_queries(example.fused))


def test_dual_cotangent_of_a_graph_from_before() -> None:
    """Forward ran outside the level; backward inside it gets a dual cotangent."""
    example = dense({"causal": True})

    def derivative(function: Callable[..., Outputs]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in example.tensors]
        outputs = function(*leaves)
        ((given,), (moving,)) = cotangents(example)
        return tangents_of_duals(lambda *c: torch.autograd.grad(outputs, leaves, c), given, moving)

    found, expected = (derivative(f) for f in (example.fused, example.formula))
    assert_close(found, expected)


def summed(f: Callable[..., Outputs], *rest: Tensor) -> Callable[[Tensor], Tensor]:
    """A loss of a linear map, of its first argument."""
    return lambda dx: sum(((x**3).sum() for x in f(dx, *rest)), torch.zeros((), dtype=FP64))


OF_LINEAR_MAPS: dict[str, Callable[[Callable[..., Outputs], tuple[Tensor, ...]], Any]] = {
    "values": lambda f, x: f(*x),
    "vmap": lambda f, x: vmap(f)(*(torch.stack((y, 2 * y)) for y in x)),
    "backward": lambda f, x: of_leaves(f, x),
    "compiled": lambda f, x: of_leaves(torch.compile(f, fullgraph=True, backend="aot_eager"), x),
    "grad": lambda f, x: grad(summed(f, *x[1:]))(x[0]),
    "vjp": lambda f, x: vjp(f, *x)[1](f(*x)),
    "jvp": lambda f, x: jvp(f, x, tuple(2 * y for y in x)),
    "jvp of one": lambda f, x: jvp(lambda dx: f(dx, *x[1:]), x[:1], x[:1])[1],
    "duals": lambda f, x: tangents_of_duals(f, x, (*x[:1], None, *x[2:])),
    "linearize": lambda f, x: linearize(f, *x)[1](*x),
    "vmap of grad": lambda f, x: vmap(grad(summed(f, *x[1:])))(torch.stack((x[0], 2 * x[0]))),
    "hessian": lambda f, x: hessian(summed(f, *x[1:]))(x[0]),
    "grad of grad": lambda f, x: grad(lambda dx: grad(summed(f, *x[1:]))(dx).square().sum())(x[0]),
}


def of_leaves(f: Callable[..., Outputs], tangents: tuple[Tensor, ...]) -> Any:
    leaves = [x.clone().requires_grad_() for x in tangents]
    return torch.autograd.grad([x.square().sum() for x in f(*leaves)], leaves)


@pytest.fixture(scope="module")
def linear_maps() -> tuple[Callable[..., Outputs], Callable[..., Outputs], tuple[Tensor, ...]]:
    """Of attention and of its formula, after the first call, which folds constants."""
    example = dense({"causal": True}, batch=1, heads=(2, 1), bias=randn(1, 1, 5, 7))
    maps = [linearize(f, *example.tensors)[1] for f in (example.fused, example.formula)]
    for f in maps:
        f(*example.tangents())
    return maps[0], maps[1], example.tangents()


@pytest.mark.parametrize("how", OF_LINEAR_MAPS)
def test_transforms_of_a_linear_map(how: str, linear_maps: Any) -> None:
    """A function of torch.func.linearize is a program with the operator of forward mode."""
    *maps, tangents = linear_maps
    found, expected = (OF_LINEAR_MAPS[how](f, tangents) for f in maps)
    assert all(x.any() for x in torch.utils._pytree.tree_leaves(expected))
    assert_close(found, expected)


def test_a_traced_program_whose_inputs_move() -> None:
    """Forward mode of a program with forward mode needs second-order tangents, which an operator does not have."""
    example = dense({"causal": True}, batch=1, heads=(2, 1))
    program = make_fx(lambda *x: jvp(example.fused, x[:3], x[3:])[1])(*example.tensors, *example.tangents())
    inputs = (*example.tensors, *example.tangents())
    assert_close(program(*inputs), jvp(example.formula, example.tensors, example.tangents())[1])
    assert_close(
        jvp(lambda *dx: program(*example.tensors, *dx), example.tangents(), example.tangents(2))[1],
        jvp(example.formula, example.tensors, example.tangents(2))[1],
    )
    with pytest.raises(flashtile.AttentionError, match="traced"):
        jvp(lambda q: program(q, *inputs[1:]), inputs[:1], inputs[3:4])


@pytest.mark.parametrize("seed", range(2))
def test_levels_that_move_different_inputs(seed: int) -> None:
    """An outer level's tangents pass through inputs that stand still in the inner one, and through its tangents."""
    example = dense({"softcap": 2.0})
    (q, k, *rest), (dq, dk, *_) = example.tensors, example.tangents()

    def inner(f: Callable[..., Outputs], q: Tensor) -> Any:
        moving = (k * q.mean(), dk * q.sum().cos()) if seed else (k, dk)
        return jvp(lambda k: f(q, k, *rest), moving[:1], moving[1:])

    assert_close(*(jvp(lambda q: inner(f, q), (q,), (dq,)) for f in (example.fused, example.formula)))  # noqa: B023
