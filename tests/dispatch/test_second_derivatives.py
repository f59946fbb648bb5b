"""Second derivatives: double backward, Hessian-vector products every way round, and what they cost in memory."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from checking import lengths_on_the_device, tile_size
from duals import assert_close
from formula import EXAMPLES, HKV, TWO_ROWS, B, Example, Outputs, dense, everything, loss, packed, paged, randn
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian as autograd_hessian
from torch.autograd.functional import hvp, vhp
from torch.func import grad, hessian, jvp, vjp

import flashtile
from flashtile.backend.tiled import transforms
from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.dispatch.operators import OPERATORS


def leaves_of(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def cotangents(example: Example) -> list[Tensor]:
    """Cotangents of `out` and `lse`, as leaves."""
    results = example.formula(*example.tensors)
    return [randn(*x.shape, seed=n).requires_grad_() for n, x in enumerate(results, start=5)]


def double_backward(function: Callable[..., Outputs], example: Example) -> list[Tensor]:
    """The gradients of all first gradients, each with its own weights, by all inputs and both cotangents."""
    leaves, upper = leaves_of(example.tensors), cotangents(example)
    with example.tiles():
        first = torch.autograd.grad(function(*leaves), leaves, upper, create_graph=True, materialize_grads=True)
        weighted = sum((x * dx).sum() for x, dx in zip(first, example.tangents(), strict=True))
        return list(torch.autograd.grad(weighted, [*leaves, *upper], materialize_grads=True))


@pytest.mark.parametrize("name", EXAMPLES)
def test_double_backward(name: str) -> None:
    """Every second derivative that exists, mixed ones and those by the cotangents among them."""
    example = EXAMPLES[name]()
    example.scores = TWO_ROWS
    assert_close(double_backward(example.fused, example), double_backward(example.formula, example))


@pytest.mark.parametrize("name", ["packed", "packed with everything", "paged"])
def test_lengths_on_the_device(name: str) -> None:
    """The way of a GPU, where the host reads no lengths: gathered rows."""
    example = EXAMPLES[name]()
    with lengths_on_the_device():
        found = double_backward(example.fused, example)
    assert_close(found, double_backward(example.formula, example))


@pytest.mark.parametrize(
    ("tile", "scores"), [((1, 1), 1), ((1, 1), 2**20), ((3, 8), 60), ((3, 8), 2**20), ((64, 64), 1), ((64, 64), 60)]
)
def test_any_tile(tile: tuple[int, int], scores: int) -> None:
    """Blocks of a row of a head, up to blocks of all rows, heads and sequences."""
    example = everything()
    example.tile, example.scores = tile, scores
    assert_close(double_backward(example.fused, example), double_backward(example.formula, example))


def test_what_is_no_query_and_no_key_has_no_part() -> None:
    """Tokens of no sequence hold NaN, in inputs and cotangents, and their second derivatives are 0."""
    example = packed({"causal": True})
    expected = double_backward(example.formula, example)
    q, k, v = (x.clone() for x in example.tensors)
    q[8:] = k[11:] = v[11:] = torch.nan
    example.inputs |= {"q": q, "k": k, "v": v}
    found = double_backward(example.fused, example)
    assert_close(found, expected)
    assert not found[0][8:].any()
    assert not found[1][11:].any()


@pytest.mark.parametrize("wanted", [(0,), (1, 2), (2,), (3,), (0, 6)])
def test_only_some_inputs_require_a_gradient(wanted: tuple[int, ...]) -> None:
    """Leaves: q, k, v, bias, slopes, sinks and score_mod's first tensor."""
    example = everything()

    def second(function: Callable[..., Outputs]) -> tuple[Tensor, ...]:
        tensors = [x.clone().requires_grad_(n in wanted) for n, x in enumerate(example.tensors)]
        leaves = [tensors[n] for n in wanted]
        first = torch.autograd.grad(loss(function)(*tensors), leaves, create_graph=True)
        return torch.autograd.grad(sum(torch.sin(x).sum() for x in first), leaves)

    assert_close(second(example.fused), second(example.formula))


@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_one_result_alone(result: int) -> None:
    """The other has no cotangent at all."""
    example = everything()

    def second(function: Callable[..., Outputs]) -> tuple[Tensor, ...]:
        leaves = leaves_of(example.tensors)
        value = torch.sin(function(*leaves)[result]).sum()
        first = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), leaves, materialize_grads=True)

    assert_close(second(example.fused), second(example.formula))


@pytest.mark.parametrize(
    "make", [everything, lambda: packed({"causal": True}), paged], ids=["dense", "packed", "paged"]
)
def test_gradgradcheck(make: Callable[[], Example]) -> None:
    """Against finite differences: nothing that the formula in these tests could have wrong too."""
    example = make()
    example.tile = (4, 4)
    leaves = leaves_of(example.tensors)

    def results(*tensors: Tensor) -> Outputs:
        out, lse = example.fused(*tensors)
        return out, torch.where(lse == -torch.inf, 0, lse)

    assert torch.autograd.gradgradcheck(results, leaves, fast_mode=True)
    assert torch.autograd.gradcheck(results, leaves, check_forward_ad=True, fast_mode=True)


# Hessian-vector products ----------------------------------------------------------------------------------------------


def forward_over_reverse(f: Callable[..., Tensor], tensors: Any, tangents: Any) -> Any:
    return jvp(grad(f, argnums=tuple(range(len(tensors)))), tensors, tangents)[1]


def reverse_over_reverse(f: Callable[..., Tensor], tensors: Any, tangents: Any) -> Any:
    return vjp(grad(f, argnums=tuple(range(len(tensors)))), *tensors)[1](tangents)


def reverse_over_forward(f: Callable[..., Tensor], tensors: Any, tangents: Any) -> Any:
    return grad(lambda *x: jvp(f, x, tangents)[1], argnums=tuple(range(len(tensors))))(*tensors)


def double_backward_of_autograd(f: Callable[..., Tensor], tensors: Any, tangents: Any) -> Any:
    leaves = leaves_of(tensors)
    first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    return torch.autograd.grad(first, leaves, tangents)


def duals_over_backward(f: Callable[..., Tensor], tensors: Any, tangents: Any) -> Any:
    with forward_ad.dual_level():
        leaves = leaves_of(tensors)
        duals = [forward_ad.make_dual(x, dx) for x, dx in zip(leaves, tangents, strict=True)]
        first = torch.autograd.grad(f(*duals), duals)
        return [forward_ad.unpack_dual(x).tangent for x in first]


WAYS = (
    forward_over_reverse,
    reverse_over_reverse,
    reverse_over_forward,
    double_backward_of_autograd,
    duals_over_backward,
    lambda f, tensors, tangents: hvp(f, tensors, tangents)[1],
    lambda f, tensors, tangents: vhp(f, tensors, tangents)[1],
)
ROUND = ("forward over reverse", "reverse over reverse", "reverse over forward", "autograd", "duals", "hvp", "vhp")


@pytest.mark.parametrize(
    # Packed by `tiled`, duals over backward fail an assertion of PyTorch's about views.
    ("make", "backend"), [(everything, "tiled"), (EXAMPLES["packed with everything"], "auto")], ids=["dense", "packed"],
)  # fmt: skip
def test_hessian_vector_products_agree(make: Callable[[], Example], backend: str) -> None:
    """Seven ways to one product, with every feature and every input."""
    example = replace(make(), backend=backend)
    expected = double_backward_of_autograd(loss(example.formula), example.tensors, example.tangents())
    for name, way in zip(ROUND, WAYS, strict=True):
        with example.tiles():
            found = way(loss(example.fused), example.tensors, example.tangents())
        for argument, x, y in zip(example.inputs, found, expected, strict=True):
            torch.testing.assert_close(x, y, msg=lambda text, at=f"{name}, {argument}": f"{at}: {text}")


HESSIANS: dict[str, Callable[[Callable[..., Tensor], Tensor], Tensor]] = {
    "torch.func.hessian": lambda f, x: hessian(f)(x),
    "torch.autograd.functional.hessian": lambda f, x: autograd_hessian(f, x),  # type: ignore[dict-item]
    "forward mode outside": lambda f, x: autograd_hessian(  # type: ignore[dict-item]
        f, x, vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
}


@pytest.mark.parametrize("name", HESSIANS)
def test_hessian(name: str) -> None:
    example = dense({"causal": True, "softcap": 1.0}, seqlen_q=3, seqlen_k=4)

    def of_queries(function: Callable[..., Outputs]) -> Callable[[Tensor], Tensor]:
        return lambda q: loss(function)(q, *example.tensors[1:])

    found, expected = (HESSIANS[name](of_queries(f), example.tensors[0]) for f in (example.fused, example.formula))
    assert_close(found, expected)


def test_third_order() -> None:
    example = dense({"causal": True})

    def third(function: Callable[..., Outputs]) -> Any:
        first = grad(lambda *x: loss(function)(*x), argnums=(0, 1, 2))
        second = grad(lambda *x: sum(y.square().sum() for y in first(*x)), argnums=(0, 1, 2))
        return grad(lambda *x: sum(torch.sin(y).sum() for y in second(*x)), argnums=(0, 1, 2))(*example.tensors)

    assert_close(third(example.fused), third(example.formula))


def test_gradient_penalty() -> None:
    """As trained with: backward(create_graph=True) inside, backward() outside, gradients in `.grad`."""
    example = dense(bias=randn(1, 1, 1, 7))

    def penalised(function: Callable[..., Outputs]) -> list[Tensor]:
        leaves = leaves_of(example.tensors)
        value = loss(function)(*leaves)
        slopes = torch.autograd.grad(value, leaves[:1], create_graph=True)[0]
        (value + (slopes.flatten(1).norm(dim=1) - 1).square().sum()).backward()
        return [x.grad for x in leaves]  # type: ignore[misc]

    assert_close(penalised(example.fused), penalised(example.formula))


def test_a_named_backend_has_the_same_second_derivatives() -> None:
    """`reference` computes the first derivative itself; the second comes from another backend."""
    example = everything()
    found = double_backward(lambda *x: example.fused(*x, backend="reference"), example)
    assert_close(found, double_backward(example.formula, example))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    """Second derivatives come in the dtypes of the inputs."""
    example = dense({"causal": True})
    expected = double_backward_of_autograd(loss(example.formula), example.tensors, example.tangents())
    low = [tuple(x.to(dtype) for x in xs) for xs in (example.tensors, example.tangents())]
    found = double_backward_of_autograd(loss(example.fused), *low)
    tolerance = 300 * torch.finfo(dtype).eps if dtype is torch.float32 else 0.15
    for x, y in zip(found, expected, strict=True):
        assert x.dtype is dtype
        assert (x.double() - y).norm() <= tolerance * y.norm()


@pytest.mark.parametrize(
    ("scores", "count"), [(1, B * HKV * 5), (2**20, 3)], ids=["a row of a head at a time", "all heads at once"]
)
def test_each_block_is_computed_once(scores: int, count: int) -> None:
    """A second derivative reads neither the results nor the gradients, so they are not computed again."""
    q, k, v = leaves_of(dense().tensors)
    out = flashtile.attention(q, k, v, causal=True, backend="tiled")
    gradients = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
    blocks = mock.patch.object(transforms, "forward_rows", wraps=transforms.forward_rows)
    operator = mock.patch.object(OPERATORS["dense"], "differentiate", wraps=OPERATORS["dense"].differentiate)
    with tile_size(2, 3, scores), blocks as blocks, operator as operator:
        torch.autograd.grad(gradients, (q, k, v), (q, k, v))
    assert blocks.call_count == count
    assert operator.call_count == 0


# Memory ---------------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that `run` has allocated at a time."""
    return live_and_peak_bytes(run)[1]


def attention_loss(*tensors: Tensor) -> Tensor:
    return flashtile.attention(*tensors, causal=True).square().sum()


MEMORY: dict[str, Callable[[tuple[Tensor, ...]], Any]] = {
    "jvp": lambda x: jvp(lambda *x: flashtile.attention(*x, causal=True), x, x)[1],
    "double backward": lambda x: double_backward_of_autograd(attention_loss, x, x),
    "forward over reverse": lambda x: forward_over_reverse(attention_loss, x, x),
    "gradient of a jvp": lambda x: reverse_over_forward(attention_loss, x, x),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_linear(name: str) -> None:
    """Twice the length, twice the memory; and far below one matrix of all scores."""
    peaks = []
    for seqlen in (320, 640):
        tensors = tuple(torch.randn(1, 1, seqlen, 4) for _ in range(3))
        with tile_size(4, 128):
            peaks.append(peak_bytes(lambda: MEMORY[name](tensors)))  # noqa: B023
    assert peaks[1] < 2.1 * peaks[0]
    assert peaks[1] < 640 * 640 * 4 / 2


def test_the_measure_sees_a_score_matrix() -> None:
    def formula(*x: Tensor) -> Tensor:
        q, k, v = x
        return ((q @ k.mT).softmax(-1) @ v).square().sum()

    tensors = tuple(torch.randn(1, 1, 512, 4) for _ in range(3))
    assert peak_bytes(lambda: double_backward_of_autograd(formula, tensors, tensors)) > 4 * 512 * 512 * 4
