"""torch.export, make_fx and symbolic traces of calls, and derivatives of the programs: right, or an error."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formula import EXAMPLES, SQ, D, Example, Outputs, dense, dense_formula, loss, randn
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from transformed import FACTOR, assert_close, k, q, right_or_error, second_gradient, several, tangent_of_dual, v, value

import flashtile

EXPORTED = ["plain", "window", "mask", "mask function", "bias of keys", "slopes", "sinks", "dropout"]
EXPORTED += ["more queries than keys"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", EXPORTED)
def test_export(name: str, strict: bool) -> None:
    """One operator in the program; it runs, and it can be trained."""
    example = EXAMPLES[name]()

    class Program(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Outputs:
            arguments, _ = example.arguments(tensors)
            return flashtile.attention(**arguments, return_lse=True)

    if strict and name != "plain":
        pytest.skip("Dynamo traces the public functions in test_compile")
    exported = torch.export.export(Program(), example.tensors, strict=strict)
    assert sum("flashtile.attention_forward" in str(node.target) for node in exported.graph.nodes) == 1
    program = exported.module()
    assert_close(program(*example.tensors), example.formula(*example.tensors))

    def gradients(function: Callable[..., Outputs]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in example.tensors]
        return torch.autograd.grad(loss(function)(*leaves), leaves)

    assert_close(gradients(program), gradients(example.formula))


def test_a_program_is_saved_and_loaded(tmp_path: Path) -> None:
    class Program(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashtile.attention(q, k, v, causal=True)

    torch.export.save(torch.export.export(Program(), (q, k, v)), tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2").module()
    torch.testing.assert_close(loaded(q, k, v), dense_formula(q, k, v, causal=True)[0])


def program_of(how: str, function: Callable[..., Tensor], example: Example) -> Callable[..., Tensor]:
    """The function with nothing but operators in it: no Python of ours looks at a call."""

    class Program(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return function(*tensors)

    if how == "make_fx":
        return make_fx(function)(*example.tensors)
    if how == "compile":
        torch._dynamo.reset()
        return torch.compile(function, backend="eager")
    return torch.export.export(Program(), example.tensors).module()


@pytest.mark.parametrize("how", ["make_fx", "export"])
@pytest.mark.parametrize("transform", ["grad", "jvp", "duals"])
def test_first_derivatives_of_a_traced_program(how: str, transform: str) -> None:
    example = dense({"causal": True})
    q, k, v = example.tensors
    program = program_of(how, lambda *x: flashtile.attention(*x, causal=True), example)
    tangent = example.tangents()[0]
    derivative: Callable[[Callable[[Tensor], Tensor]], Tensor] = {
        "grad": lambda f: grad(lambda q: f(q).square().sum())(q),
        "jvp": lambda f: jvp(f, (q,), (tangent,))[1],
        "duals": lambda f: tangent_of_dual(f, q, tangent),
    }[transform]
    right_or_error(lambda: derivative(lambda q: program(q, k, v)), derivative(lambda q: example.formula(q, k, v)[0]))


CURVED = flashtile.ScoreMod(lambda score, b, h, i, j, w: score * torch.tanh(w[h]) + 0.1 * score.square(), (FACTOR,))

TWICE = [("tiled", None), ("tiled", CURVED), ("reference", None)]


@pytest.mark.parametrize("how", ["make_fx", "export", "compile", "vmap"])
@pytest.mark.parametrize(
    ("backend", "score_mod"),
    TWICE,
    ids=["tiled", "score_mod", "reference"],
)
def test_second_derivatives_of_operators(how: str, backend: str, score_mod: flashtile.ScoreMod | None) -> None:
    """The derivative that is registered with an operator is an operator too: its derivative is right or an error."""
    example = dense({"causal": True} | ({} if score_mod is None else {"score_mod": score_mod.fn}))
    tensors = tuple(x.unsqueeze(1) for x in example.tensors)  # [B, 1, H, S, D]

    def call(*tensors: Tensor) -> Tensor:
        return flashtile.attention(*tensors, causal=True, score_mod=score_mod, backend=backend)

    def formula(*tensors: Tensor) -> Tensor:
        return dense_formula(*tensors, **example.fixed, score_mod_tensors=(FACTOR,) if score_mod else ())[0]

    def run() -> Tensor:
        if how == "vmap":
            return second_gradient(lambda q: value(vmap(call))(q, *tensors[1:]), tensors[0]).squeeze(1)
        program = program_of(how, call, example)
        return second_gradient(lambda q: value(program)(q, *example.tensors[1:]), example.tensors[0])

    expected = second_gradient(lambda q: value(formula)(q, *example.tensors[1:]), example.tensors[0])
    right_or_error(run, expected)


def test_symbolic_trace() -> None:
    """The call is one node, with the arguments that are no tensors as constants."""

    class Block(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = flashtile.attention(q, k=k, v=v, causal=True, return_lse=True)
            return out + lse[..., None]

    traced = torch.fx.symbolic_trace(Block())
    assert next(node.target for node in traced.graph.nodes if node.op == "call_function") is flashtile.attention
    q, k, v = (randn(1, 2, SQ, D, seed=n) for n in range(3))
    assert_close(traced(q, k, v), Block()(q, k, v))


@pytest.mark.parametrize("transform", ["jvp", "grad", "grad of jvp", "vmap of grad", "hessian"])
def test_make_fx_of_a_transform(transform: str) -> None:
    """The derivative itself, traced into a graph of operations; a small one, for each takes time."""
    example = dense({"causal": True}, batch=1, heads=(2, 1), seqlen_q=2, seqlen_k=3)
    example.tile = (64, 64)
    q, k, v = example.tensors
    dq, values = example.tangents()[0], several(v)

    def derivative(f: Callable[..., Outputs]) -> Callable[[Tensor], Tensor]:
        return {
            "jvp": lambda q: jvp(lambda q: f(q, k, v)[0], (q,), (dq,))[1],
            "grad": grad(lambda q: loss(f)(q, k, v)),
            "grad of jvp": grad(lambda q: jvp(lambda q: loss(f)(q, k, v), (q,), (dq,))[1]),
            "vmap of grad": lambda q: vmap(grad(lambda v: loss(f)(q, k, v)))(values),
            "hessian": hessian(lambda q: loss(f)(q, k, v)),
        }[transform]

    graph = make_fx(derivative(example.fused))(q)
    other = randn(*q.shape, seed=20)
    assert_close(graph(other), derivative(example.formula)(other))
