"""torch.func, torch.export and torch.compile around and inside one another: right numbers, or an error, never a zero
that should be none. Forward mode and second derivatives have files of their own.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checking import offsets, tile_size
from formula import EXAMPLES, HQ, SK, SQ, B, D, Example, Outputs, dense, dense_formula, everything, loss, randn
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx

import flashtile

TREE_LEAVES = torch.utils._pytree.tree_leaves


def assert_close(found: Any, expected: Any) -> None:
    for x, y in zip(TREE_LEAVES(found), TREE_LEAVES(expected), strict=True):
        torch.testing.assert_close(x, y)


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


# torch.func.grad and its relatives ------------------------------------------------------------------------------------


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


# vmap -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["causal", "everything", "rows without keys", "packed", "packed with everything", "paged"]
)
@pytest.mark.parametrize("wanted", ["out", "grad", "hvp"])
def test_vmap_of_all_inputs(name: str, wanted: str) -> None:
    """One call for each example, with the positions and dropout of a call of its own."""
    example = EXAMPLES[name]()
    tangents = example.tangents()

    def of_one(function: Callable[..., Outputs]) -> Callable[..., Any]:
        derivative = grad(loss(function), argnums=tuple(range(len(example.tensors))))
        return {"out": function, "grad": derivative, "hvp": lambda *x: jvp(derivative, x, tangents)[1]}[wanted]

    batch = [several(x) for x in example.tensors]
    found, expected = (
        vmap(of_one(example.fused))(*batch),
        [of_one(example.formula)(*x) for x in zip(*batch, strict=True)],
    )
    for n, one in enumerate(expected):
        assert_close([x[n] for x in TREE_LEAVES(found)], one)


@pytest.mark.parametrize("position", range(8))
def test_vmap_of_one_input(position: int) -> None:
    """q, k, v, bias, slopes, sinks and two tensors of score_mod; the batch is the last dimension."""
    example = everything()
    batch = several(example.tensors[position])

    def of_one(function: Callable[..., Outputs], x: Tensor) -> Any:
        tensors = list(example.tensors)
        tensors[position] = x
        return function(*tensors), grad(loss(function), argnums=position)(*tensors)

    found = vmap(lambda x: of_one(example.fused, x), in_dims=-1, out_dims=1)(batch.movedim(0, -1))
    expected = [of_one(example.formula, x) for x in batch]
    for n, one in enumerate(expected):
        assert_close([x.select(1, n) for x in TREE_LEAVES(found)], one)


def test_vmap_in_vmap_in_chunks() -> None:
    example = dense({"causal": True})
    q, k, v = (several(several(x, 2), 3) for x in example.tensors)
    found = vmap(vmap(example.fused, in_dims=(0, None, 0)), in_dims=(0, 0, 1), chunk_size=2)(
        q, k[:, 0], v.transpose(0, 1)
    )
    for m in range(3):
        for n in range(2):
            assert_close([x[m, n] for x in found], example.formula(q[m, n], k[m, 0], v[m, n]))


@pytest.mark.parametrize("position", range(4), ids=["q", "k", "v", "not batched"])
def test_grad_of_vmap(position: int) -> None:
    """vmap inside grad: a sum over examples, differentiated by what differs between them, and by what does not."""
    example = dense({"causal": True}, sinks=randn(HQ))

    def of_all(function: Callable[..., Outputs], *tensors: Tensor) -> Tensor:
        return vmap(loss(function), in_dims=(0, 0, 0, None))(*tensors).sum()

    tensors = (*(several(x) for x in example.tensors[:3]), example.tensors[3])
    found, expected = (
        grad(lambda *x: of_all(f, *x), argnums=position)(*tensors)  # noqa: B023
        for f in (example.fused, example.formula)
    )
    assert_close(found, expected)


def test_backward_through_vmap() -> None:
    """vmap in a graph of torch.autograd."""
    example = dense({"causal": True}, sinks=randn(HQ))

    def derivative(function: Callable[..., Outputs]) -> tuple[Tensor, ...]:
        leaves = [leaf(several(x)) for x in example.tensors]
        return torch.autograd.grad(vmap(loss(function))(*leaves).sum(), leaves)

    assert_close(derivative(example.fused), derivative(example.formula))


class Attend(torch.nn.Module):
    """Self-attention with a projection; `attention` has the signature of `flashtile.attention`."""

    def __init__(self, attention: Callable[..., Tensor] = flashtile.attention):
        super().__init__()
        self.attention = attention
        self.project = torch.nn.Linear(4, 12, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        return self.attention(q, k, v, causal=True)


def plain_attention(*tensors: Tensor, **arguments: Any) -> Tensor:
    return dense_formula(*tensors, **arguments)[0]


def test_per_sample_gradients() -> None:
    """As in the tutorial of torch.func: the gradients of each sample by the parameters of a module."""
    module, samples = Attend(), randn(3, 5, 4)
    parameters = {name: x.detach() for name, x in module.named_parameters()}

    def of_sample(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(module, parameters, (x[None],)).square().sum()

    found = vmap(grad(of_sample), in_dims=(None, 0))(parameters, samples)
    module.attention = plain_attention
    for n, x in enumerate(samples):
        expected = grad(of_sample)(parameters, x)
        for name in parameters:
            torch.testing.assert_close(found[name][n], expected[name])


def test_ensemble() -> None:
    """The parameters of several modules, stacked."""
    modules, x = [Attend() for _ in range(3)], randn(2, 5, 4)
    parameters, _ = stack_module_state(modules)
    found = vmap(lambda p: functional_call(modules[0], p, (x,)))({n: x.detach() for n, x in parameters.items()})
    for n, module in enumerate(modules):
        torch.testing.assert_close(found[n], module(x))


@pytest.mark.parametrize("randomness", ["same", "different", "error"])
def test_dropout_under_vmap(randomness: str) -> None:
    """A seed that the call draws follows vmap's rule; with one of its own, each example gets that of its seed."""
    q, k, v = (several(x)[:1].expand(3, *x.shape) for x in dense().tensors)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flashtile.attention(q, k, v, dropout_p=0.5)

    if randomness == "error":
        with pytest.raises(RuntimeError, match="randomness"):
            vmap(call)(q, k, v)
        return
    outs = vmap(call, randomness=randomness)(q, k, v)
    assert torch.equal(outs[0], outs[1]) == torch.equal(outs[0], outs[2]) == (randomness == "same")
    gradients = vmap(grad(lambda *x: call(*x).sum()), randomness=randomness)(q, k, v)
    assert torch.equal(gradients[0], gradients[1]) == (randomness == "same")


def test_a_seed_for_each_example() -> None:
    example, seeds = dense(), torch.tensor([[3], [4], [3]])

    def call(seed: Tensor) -> tuple[Tensor, Tensor]:
        def value(q: Tensor) -> Tensor:
            return flashtile.attention(q, *example.tensors[1:], dropout_p=0.5, dropout_seed=seed).square().sum()

        return grad_and_value(value)(example.tensors[0])

    outs = vmap(call)(seeds)
    for n, seed in enumerate(seeds):
        assert_close([x[n] for x in outs], call(seed))
    assert not torch.equal(outs[0][0], outs[0][1])


def test_lengths_for_each_example() -> None:
    """Index tensors too may differ from example to example; where PyTorch cannot read them, that is an error."""
    example = EXAMPLES["packed"]()
    cu_k = torch.stack((offsets(5, 2, 0, 4), offsets(1, 3, 3, 2)))

    def call(function: Callable[..., Any], cu_k: Tensor) -> Any:
        example.fixed["cu_seqlens_k"] = cu_k
        return function(*example.tensors)

    found = vmap(lambda cu: call(example.fused, cu))(cu_k)
    for n, cu in enumerate(cu_k):
        assert_close([x[n] for x in found], call(example.formula, cu))
    with contextlib.suppress(RuntimeError):  # vmap reads no values of a batched tensor
        found = vmap(lambda cu: call(lambda *x: jvp(example.fused, x, example.tangents())[1], cu))(cu_k)
        for n, cu in enumerate(cu_k):
            assert_close([x[n] for x in found], call(lambda *x: jvp(example.formula, x, example.tangents())[1], cu))


@pytest.mark.parametrize("with_lse", [False, True])
def test_batched_cotangents_of_autograd(with_lse: bool) -> None:
    """is_grads_batched and vectorized jacobians; the last calls are repeated ones."""
    leaves = [leaf(x) for x in dense().tensors]
    for _ in range(4):
        out, lse = flashtile.attention(*leaves, return_lse=True)
        dout = torch.randn(3, *out.shape)
        outputs, cotangents = [out, lse][: 1 + with_lse], [dout, torch.randn(3, *lse.shape)][: 1 + with_lse]
        found = torch.autograd.grad(outputs, leaves, cotangents, is_grads_batched=True, retain_graph=True)
        for n in range(3):
            each = torch.autograd.grad(outputs, leaves, [x[n] for x in cotangents], retain_graph=True)
            assert_close([x[n] for x in found], each)
    q, k, v = dense().tensors
    jacobian = torch.autograd.functional.jacobian
    found, right = (jacobian(lambda q: flashtile.attention(q, k, v), q, vectorize=x) for x in (True, False))
    torch.testing.assert_close(found, right)


def test_batches_of_none() -> None:
    """As for operations of PyTorch's own: results without examples, of the right shapes."""
    q, k, v = (leaf(x) for x in dense().tensors)
    out = flashtile.attention(q, k, v)
    none, douts = q.new_empty((0, *q.shape)), out.new_empty((0, *out.shape))
    assert vmap(lambda q: flashtile.attention(q, k, v))(none).shape == douts.shape
    pullback = torch.func.vjp(lambda q, k: flashtile.attention(q, k, v), q, k)[1]
    assert [x.shape for x in vmap(pullback)(douts)] == [none.shape, (0, *k.shape)]
    jacobian = torch.func.jacrev(lambda q: flashtile.attention(q, k, v)[..., :0])(q)
    assert jacobian.shape == (*out.shape[:-1], 0, *q.shape)
    [dq] = _vmap(lambda dout: torch.autograd.grad(out, (q,), dout, retain_graph=True))(douts)
    assert dq.shape == none.shape


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


# Traced programs ------------------------------------------------------------------------------------------------------

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


FACTOR = randn(HQ, seed=9)
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


# torch.compile --------------------------------------------------------------------------------------------------------


Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
Attention = Callable[[Tensor, Tensor], Tensor]  # of q and a bias
q, k, v = dense().tensors
BIAS, DQ, ONE = randn(1, HQ, 1, SK), randn(B, HQ, SQ, D, seed=9), torch.ones((), dtype=torch.float64)


def fused(q: Tensor, bias: Tensor = BIAS) -> Tensor:
    return flashtile.attention(q, k[: q.shape[0]], v[: q.shape[0]], causal=True, bias=bias)


def formula(q: Tensor, bias: Tensor = BIAS) -> Tensor:
    return dense_formula(q, k[: q.shape[0]], v[: q.shape[0]], causal=True, bias=bias)[0]


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
@pytest.mark.parametrize(
    ("name", "fullgraph"),  # a program of one graph is the same one where graphs may break
    [(name, fullgraph) for name in COMBINATIONS for fullgraph in (False, True) if fullgraph or name not in ONE_GRAPH],
)
def test_compiled_combination(name: str, fullgraph: bool) -> None:
    """Compiled inside and outside of other transforms: right, or an error."""

    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")

    run = COMBINATIONS[name]
    with tile_size(3, 4):  # two row blocks and two key blocks: Dynamo traces each
        right = right_or_error(lambda: run(fused, compiler), run(formula, lambda function: function))
    assert right or name not in (ONE_GRAPH if fullgraph else WORK)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("fullgraph", [False, True])
def test_checkpoint_in_a_compiled_function(fullgraph: bool) -> None:
    def checkpointed(q: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(value(fused), q, use_reentrant=False)

    compiled = torch.compile(checkpointed, fullgraph=fullgraph, backend="aot_eager")
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
