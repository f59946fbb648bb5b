"""Forward mode: the tangent of every input, against that of the formula. A zero or missing tangent is wrong."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from checking import lengths_on_the_device
from formula import EXAMPLES, FP64, TWO_ROWS, Example, Outputs, dense, dense_formula, everything, loss, packed, randn
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import flashtile

STILL = {"no keys"}  # examples whose results do not depend on q, k and v


def of_one(function: Callable[..., Outputs], example: Example, position: int) -> Callable[[Tensor], Outputs]:
    """`function` of one input alone; the others stay."""

    def of_input(x: Tensor) -> Outputs:
        tensors = list(example.tensors)
        tensors[position] = x
        return function(*tensors)

    return of_input


def assert_close(found: Any, expected: Any, **tolerance: float) -> None:
    pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected), strict=True)
    for x, y in pairs:
        torch.testing.assert_close(x, y, **tolerance)


def tangents_of_duals(function: Callable[..., Outputs], tensors: Any, tangents: Any) -> list[Tensor]:
    """Forward mode of torch.autograd; `None` stands for an input without a tangent. A missing one is an error."""
    with forward_ad.dual_level():
        given = zip(tensors, tangents, strict=True)
        duals = [x if dx is None else forward_ad.make_dual(x, dx) for x, dx in given]
        found = [forward_ad.unpack_dual(x).tangent for x in function(*duals)]
    assert all(x is not None for x in found)
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_tangent_of_each_input(name: str) -> None:
    """One moving input at a time, so that none can hide behind another; both results."""
    example = EXAMPLES[name]()
    for n, (argument, dx) in enumerate(zip(example.inputs, example.tangents(), strict=True)):
        x = example.tensors[n]
        found, expected = (jvp(of_one(f, example, n), (x,), (dx,)) for f in (example.fused, example.formula))
        assert_close(found, expected)
        moves = any(bool(tangent.any()) for tangent in expected[1])
        assert moves or name.startswith("no keys"), f"{argument} does not move anything: the example tests nothing"


@pytest.mark.parametrize("name", EXAMPLES)
def test_tangents_of_dual_tensors(name: str) -> None:
    """All inputs at once, in torch.autograd's own forward mode."""
    example = EXAMPLES[name]()
    example.scores = TWO_ROWS
    found, expected = (
        tangents_of_duals(f, example.tensors, example.tangents()) for f in (example.fused, example.formula)
    )
    assert_close(found, expected)


@pytest.mark.parametrize("name", ["packed", "packed with everything", "paged"])
def test_lengths_on_the_device(name: str) -> None:
    """The way of a GPU, where the host reads no lengths: gathered rows."""
    example = EXAMPLES[name]()
    with lengths_on_the_device():
        found = jvp(example.fused, example.tensors, example.tangents())
    assert_close(found, jvp(example.formula, example.tensors, example.tangents()))


@pytest.mark.parametrize("name", ["plain", "everything", "packed with everything"])
@pytest.mark.parametrize("tile", [(1, 1), (3, 8), (64, 64)])
def test_any_tile(name: str, tile: tuple[int, int]) -> None:
    example = EXAMPLES[name]()
    example.tile = tile
    found, expected = (jvp(f, example.tensors, example.tangents()) for f in (example.fused, example.formula))
    assert_close(found, expected)


def test_what_is_no_query_and_no_key_moves_nothing() -> None:
    """Tokens of no sequence hold NaN, and so do their tangents."""
    example = packed({"causal": True})
    tensors, tangents = ([x.clone() for x in xs] for xs in (example.tensors, example.tangents()))
    expected = jvp(example.fused, tuple(tensors), tuple(tangents))
    for x in (*tensors, *tangents):
        x[8 if x is tensors[0] or x is tangents[0] else 11 :] = torch.nan
    found = jvp(example.fused, tuple(tensors), tuple(tangents))
    assert_close(found, expected)
    assert not found[1][0][8:].any()


def test_rows_that_see_nothing_stand_still() -> None:
    """Rows 0 to 2 see no key; their tangents are 0, except that lse of a row with a sink is the sink."""
    example = dense({"causal": True}, seqlen_q=7, seqlen_k=4)
    _, (dout, dlse) = jvp(example.fused, example.tensors, example.tangents())
    assert not dout[:, :, :3].any()
    assert not dlse[:, :, :3].any()
    assert dout[:, :, 3:].all()
    with_sinks = EXAMPLES["more queries than keys, and sinks"]()
    _, (dout, dlse) = jvp(with_sinks.fused, with_sinks.tensors, with_sinks.tangents())
    assert not dout[:, :, :3].any()
    assert_close(dlse[:, :, :3], with_sinks.tangents()[-1][:, None].expand(2, 4, 3))


# Low precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Tangents come in the dtypes of the results, and are as exact as those."""
    example = dense({"causal": True, "softcap": 3.0}, sinks=randn(4))
    low = [x.to(dtype) for x in example.tensors]
    rounded = [x.double() for x in low]
    tangents = [x.to(dtype) for x in example.tangents()]
    results = jvp(example.fused, tuple(low), tuple(tangents))
    assert [x.dtype for x in torch.utils._pytree.tree_leaves(results)] == [dtype, torch.float32] * 2
    expected = jvp(example.formula, tuple(rounded), tuple(x.double() for x in tangents))
    for x, y in zip(torch.utils._pytree.tree_leaves(results), torch.utils._pytree.tree_leaves(expected), strict=True):
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x.double(), y, rtol=2 * eps, atol=8 * eps)


def test_autocast() -> None:
    """q, k and v become bf16; primals, tangents and results stay consistent."""
    example = dense({"causal": True})
    tensors, tangents = (tuple(x.float() for x in xs) for xs in (example.tensors, example.tangents()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = jvp(example.fused, tensors, tangents)
    assert found[0][0].dtype is found[1][0].dtype is torch.bfloat16
    expected = jvp(example.formula, example.tensors, example.tangents())
    assert_close([x.double() for x in found[1]], list(expected[1]), rtol=0.05, atol=0.05)


# Inside and around other transforms -----------------------------------------------------------------------------------


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


# What could be missed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_a_named_backend_has_the_same_tangents(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`reference` has no forward mode of its own; its tangents are computed like those of `tiled`."""
    example = everything()
    expected = jvp(example.formula, example.tensors, example.tangents())
    if how == "environment":
        monkeypatch.setenv("FLASHTILE_BACKEND", "reference")
    options = {"backend": "reference"} if how == "argument" else {}
    assert_close(jvp(lambda *x: example.fused(*x, **options), example.tensors, example.tangents()), expected)


def passes_of(function: Callable[[], Any]) -> list[str]:
    """The passes that a function runs; nothing of it is computed by the composed derivatives."""
    composed = mock.patch("flashtile.dispatch.derivatives.attention_function", side_effect=AssertionError)
    with composed, flashtile.calls() as counts:
        function()
    return [row.direction for row in counts.rows for _ in range(row.calls)]


def test_each_pass_runs_once() -> None:
    """Outside forward mode a call is one operator. Inside, results and tangents are one pass, and so is backward
    through the results, also where autograd has recorded the tangents (MeanFlow's stop-gradient).
    """
    example = dense()
    tensors, tangents = example.tensors, example.tangents()
    assert passes_of(lambda: example.fused(*tensors)) == ["forward"]
    assert passes_of(lambda: jvp(example.fused, tensors, tangents)) == ["tangents"]
    assert passes_of(lambda: tangents_of_duals(example.fused, tensors, tangents)) == ["tangents"]

    def stopped(q: Tensor) -> Tensor:
        (out, _), (dout, _) = jvp(lambda q: example.fused(q, *tensors[1:]), (q,), tangents[:1])
        return (out - dout.detach()).square().sum()

    assert passes_of(lambda: grad(stopped)(tensors[0])) == ["tangents", "backward"]
    leaf = tensors[0].clone().requires_grad_()
    assert passes_of(lambda: stopped(leaf).backward()) == ["tangents", "backward"]
    both = [x.clone().requires_grad_() for x in tangents]  # the tangents are linear in those of inputs
    assert passes_of(lambda: jvp(example.fused, tensors, tuple(both))[1][0].sum().backward()) == [
        "tangents",
        "backward",
    ]


def test_a_batch_of_directions_shares_the_results() -> None:
    """Directions in a batch share the results: `vmap` may return those unbatched."""
    example = dense({"causal": True})
    q, rest = example.tensors[0], example.tensors[1:]
    directions = torch.stack([randn(*q.shape, seed=n) for n in range(3)])

    def along(function: Callable[..., Outputs], dq: Tensor) -> tuple[Tensor, Tensor]:
        (out, _), (dout, _) = jvp(lambda q: function(q, *rest), (q,), (dq,))
        return out, dout

    found, expected = (
        vmap(lambda dq: along(f, dq), out_dims=(None, 0))(directions)  # noqa: B023
        for f in (example.fused, example.formula)
    )
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


class Holder:
    """An object in which a score_mod hides a tensor."""

    w: Tensor


HOLDER = Holder()
UNDECLARED: dict[str, Callable[[Tensor], Callable[..., Tensor]]] = {
    "a list": lambda w: (lambda box: lambda score, b, h, i, j: score * box[0][h])([w]),
    "a default argument": lambda w: lambda score, b, h, i, j, w=w: score * w[h],
    "an attribute": lambda w: setattr(HOLDER, "w", w) or (lambda score, b, h, i, j: score * HOLDER.w[h]),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("where", UNDECLARED)
@pytest.mark.parametrize("mode", ["jvp", "duals", "grad", "backward"])
def test_score_mod_finds_tensors(where: str, mode: str) -> None:
    """Wherever a function that can be traced reads them. Otherwise the derivative would be lost, which raises."""
    example = dense()

    def call(w: Tensor) -> Outputs:
        return flashtile.attention(*example.tensors, score_mod=UNDECLARED[where](w), return_lse=True)

    def untraceable(w: Tensor) -> Outputs:
        fn = UNDECLARED[where](w)
        return flashtile.attention(
            *example.tensors, score_mod=lambda *x: fn(*x) + torch.sinh(x[0]), return_lse=True, backend="tiled"
        )

    def formula(w: Tensor) -> Outputs:
        return example.formula(example.tensors[0] * w[:, None, None], *example.tensors[1:])

    w, dw = randn(4), randn(4, seed=1)
    run = {
        "jvp": lambda call: jvp(call, (w,), (dw,)),
        "duals": lambda call: tangents_of_duals(call, (w,), (dw,)),
        "grad": lambda call: grad(lambda w: call(w)[0].sum())(w),
        "backward": lambda call: torch.autograd.grad(call(leaf := w.clone().requires_grad_())[0].sum(), leaf),
    }[mode]
    assert_close(run(call), run(formula))
    with pytest.raises(flashtile.AttentionError, match="score_mod"):
        run(untraceable)


def test_score_mod_with_a_captured_tensor() -> None:
    """A tensor in the closure of a bare function is found."""
    example = dense()

    def fused(w: Tensor) -> Outputs:
        return flashtile.attention(*example.tensors, score_mod=lambda s, b, h, i, j: s * w[h], return_lse=True)

    def formula(w: Tensor) -> Outputs:
        return example.formula(example.tensors[0] * w[:, None, None], *example.tensors[1:])

    w, dw = randn(4), randn(4, seed=1)
    assert_close(jvp(fused, (w,), (dw,)), jvp(formula, (w,), (dw,)))
    assert_close(tangents_of_duals(fused, (w,), (dw,)), tangents_of_duals(formula, (w,), (dw,)))
