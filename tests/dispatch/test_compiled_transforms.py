"""torch.compile inside and outside of torch.func's transforms: right, or an error, never a zero that should be none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import tile_size
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from transformed import (
    BIAS,
    DQ,
    FACTOR,
    ONE,
    formula,
    fused,
    gradient,
    k,
    q,
    right_or_error,
    second_gradient,
    tangent_of_dual,
    v,
    value,
)

import flashtile

Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
Attention = Callable[[Tensor, Tensor], Tensor]  # of q and a bias


def of_examples(f: Attention) -> Callable[[Tensor], Tensor]:
    return vmap(lambda x: f(x[None]))


# Each takes the attention and a compiler (or the identity), and returns what is to be the same for every compiler.
COMBINATIONS: dict[str, Callable[[Attention, Compiler], Any]] = {
    "compile(grad)": lambda f, c: c(grad(value(f)))(q),
    "compile(grad) by bias": lambda f, c: c(grad(lambda b: value(f)(q, b)))(BIAS),
    "compile(vjp)": lambda f, c: c(lambda q: vjp(value(f), q)[1](ONE)[0])(q),
    "compile(jvp)": lambda f, c: c(lambda q: jvp(f, (q,), (DQ,))[1])(q),
    "compile(jacrev)": lambda f, c: c(jacrev(lambda q: f(q).sum((0, 1))))(q),
    "compile(jacfwd)": lambda f, c: c(jacfwd(lambda q: f(q).sum((0, 1))))(q),
    "compile(hessian)": lambda f, c: c(hessian(lambda x: value(f)(x)))(q[:, :, :1]),
    "compile(grad of grad)": lambda f, c: c(grad(lambda q: grad(value(f))(q).square().sum()))(q),
    "compile(grad of jvp)": lambda f, c: c(grad(lambda q: jvp(value(f), (q,), (DQ,))[1]))(q),
    "compile(jvp of grad)": lambda f, c: c(lambda q: jvp(grad(value(f)), (q,), (DQ,))[1])(q),
    "compile(vmap)": lambda f, c: c(of_examples(f))(q),
    "compile(vmap of grad)": lambda f, c: c(vmap(grad(lambda x: value(f)(x[None]))))(q),
    "compile(vmap of jvp)": lambda f, c: c(vmap(lambda x, dx: jvp(lambda x: f(x[None]), (x,), (dx,))[1]))(q, DQ),
    "compile(grad of vmap)": lambda f, c: c(grad(lambda q: torch.sin(of_examples(f)(q)).sum()))(q),
    "compile(autograd.grad)": lambda f, c: c(lambda q: gradient(value(f), q))(q),
    "compile(second gradient)": lambda f, c: c(lambda q: second_gradient(value(f), q))(q),
    "grad(compile)": lambda f, c: grad(c(value(f)))(q),
    "vjp(compile)": lambda f, c: vjp(c(value(f)), q)[1](ONE)[0],
    "jvp(compile)": lambda f, c: jvp(c(f), (q,), (DQ,))[1],
    "jvp(grad(compile))": lambda f, c: jvp(grad(c(value(f))), (q,), (DQ,))[1],
    "grad(grad(compile))": lambda f, c: grad(lambda q: grad(c(value(f)))(q).square().sum())(q),
    "hessian(compile)": lambda f, c: hessian(c(value(f)))(q[:, :, :1]),
    "vmap(compile)": lambda f, c: vmap(lambda x: c(f)(x[None]))(q),
    "grad(vmap(compile))": lambda f, c: grad(lambda q: torch.sin(vmap(lambda x: c(f)(x[None]))(q)).sum())(q),
    "second gradient of compile": lambda f, c: second_gradient(c(value(f)), q),
    "gradient of compile(vmap)": lambda f, c: gradient(c(lambda q: torch.sin(of_examples(f)(q)).sum()), q),
    "gradient of compile(jvp)": lambda f, c: gradient(c(lambda q: jvp(f, (q,), (DQ,))[1].square().sum()), q),
    "gradient of compile(grad)": lambda f, c: gradient(c(lambda q: grad(value(f))(q).square().sum()), q),
}
# What docs/transforms.md says to work; the first two in one graph.
ONE_GRAPH = {"compile(vmap)", "gradient of compile(vmap)"}
WORK = ONE_GRAPH | {
    "compile(jvp)",
    "compile(jacfwd)",
    "compile(hessian)",
    "compile(grad of jvp)",
    "compile(jvp of grad)",
    "compile(vmap of jvp)",
    "compile(autograd.grad)",
    "grad(compile)",
    "vjp(compile)",
    "jvp(compile)",
    "jvp(grad(compile))",
    "grad(grad(compile))",
    "hessian(compile)",
    "vmap(compile)",
    "grad(vmap(compile))",
    "gradient of compile(jvp)",
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", COMBINATIONS)
def test_compiled_combination(name: str) -> None:
    """Compiled inside and outside of other transforms: right, or an error. Where one graph is demanded, a program of
    one graph is the same, and any other is an error of Dynamo.
    """

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=name in ONE_GRAPH, backend="aot_eager")

    run = COMBINATIONS[name]
    with tile_size(3, 4):  # two row blocks and two key blocks: Dynamo traces each
        right = right_or_error(lambda: run(fused, compiler), run(formula, lambda function: function))
    assert right or name not in WORK


@pytest.mark.usefixtures("fresh_dynamo")
def test_checkpoint_in_a_compiled_function() -> None:
    def checkpointed(q: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(value(fused), q, use_reentrant=False)

    compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradient(compiled, q), gradient(value(formula), q))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("tensors", [(), (FACTOR,)], ids=["no tensors", "a tensor"])
def test_a_score_mod_made_in_a_compiled_function(tensors: tuple[Tensor, ...], fullgraph: bool) -> None:
    def call(q: Tensor) -> Tensor:
        fn = (lambda score, b, h, i, j, w: score * w[h]) if tensors else (lambda score, b, h, i, j: score * 2)
        return flashtile.attention(q, k, v, score_mod=flashtile.ScoreMod(fn, tensors))

    compiled = torch.compile(call, fullgraph=fullgraph, backend="aot_eager")
    assert not right_or_error(lambda: compiled(q), call(q)) or not fullgraph


@pytest.mark.usefixtures("fresh_dynamo")
def test_graphs_from_before_are_not_used_for_duals() -> None:
    """A function compiled outside forward mode, then called in it, and the other way round."""
    compiled = torch.compile(fused, backend="aot_eager")
    one, dq = q[:1], DQ[:1]
    torch.testing.assert_close(compiled(one), formula(one))
    right_or_error(lambda: tangent_of_dual(compiled, one, dq), tangent_of_dual(formula, one, dq))
    right_or_error(lambda: jvp(compiled, (one,), (dq,))[1], jvp(formula, (one,), (dq,))[1])
    torch.testing.assert_close(gradient(lambda q: value(compiled)(q), one), gradient(value(formula), one))
