"""vmap of calls and of their derivatives: one call for each example."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checking import offsets
from formula import EXAMPLES, HQ, Outputs, dense, dense_formula, everything, loss, randn
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.func import functional_call, grad, grad_and_value, jvp, stack_module_state, vmap
from transformed import TREE_LEAVES, assert_close, leaf, several

import flashtile


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
