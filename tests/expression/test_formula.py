"""Traced formulas: values, derivatives, text, and what cannot be traced."""

import functools
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from programs import functions
from torch import Tensor

from flashtile.expression import Formula, Untraced, program
from flashtile.expression.builder import Builder
from flashtile.expression.derivative import partials
from flashtile.expression.formula import formula_of
from flashtile.expression.program import INT32, INT64, used
from flashtile.expression.purity import MASK_MOD
from flashtile.expression.torch_code import run
from flashtile.expression.trace import trace
from flashtile.testing import score_functions

REAL = torch.float64


def inputs() -> dict[str, Tensor]:
    """Scores [2, 4, 5, 6] and their indices."""
    b, h, i, j = (torch.arange(n).view([-1 if d == dim else 1 for d in range(4)]) for dim, n in enumerate((2, 4, 5, 6)))
    score = 2 * torch.randn(2, 4, 5, 6, dtype=REAL)
    return {"score": score, "b": b, "h": h, "q_idx": i, "k_idx": j}


def traced(fn: Callable[..., Any], *tensors: Tensor) -> Formula:
    found = formula_of(fn, tensors)
    assert not isinstance(found, Untraced), found
    return found[0]


def assert_as_autograd(fn: Callable[..., Tensor], *tensors: Tensor) -> None:
    """The formula's value, gradients and tangent are those of the function."""
    formula, pairs = traced(fn, *tensors), inputs()
    leaves = [pairs["score"].requires_grad_(), *(x.clone().requires_grad_() for x in tensors)]
    expected = fn(*pairs.values(), *leaves[1:])
    [found] = run(formula.program, [*pairs.values()], tensors)
    torch.testing.assert_close(found.broadcast_to(expected.shape), expected)
    ds = torch.randn_like(expected)
    gradients = [torch.zeros(())] * len(leaves)
    if expected.requires_grad:
        gradients = list(torch.autograd.grad(expected, leaves, ds, allow_unused=True, materialize_grads=True))
    derivative = formula.partials([True] * len(tensors))
    results = [x.broadcast_to(ds.shape) for x in run(derivative.program, [*pairs.values()], tensors)]
    torch.testing.assert_close(ds * results[0].detach(), gradients[0].broadcast_to(ds.shape))
    for n, x in enumerate(tensors):
        total = torch.zeros_like(x)
        for load in derivative.loads:
            if load.tensor == n:
                total.index_put_([results[m].long() for m in load.indices], (ds * results[load.partial]).detach(), True)
        torch.testing.assert_close(total, gradients[1 + n].broadcast_to(x.shape))
    inputs_, directions = (pairs["score"].detach(), *tensors), [torch.randn_like(x) for x in (ds, *tensors)]
    indices = [x for name, x in pairs.items() if name != "score"]
    tangent = torch.func.jvp(lambda s, *x: fn(s, *indices, *x), inputs_, tuple(directions))[1]
    pushed = formula.pushforward([True] * len(tensors))
    _, partial, along = run(pushed.program, [*pairs.values()], (*tensors, *directions[1:]))
    torch.testing.assert_close((directions[0] * partial + along).detach().broadcast_to(tangent.shape), tangent)


@given(functions())
def test_random_functions(fn: Callable[..., Tensor]) -> None:
    assert_as_autograd(fn, torch.randn(4, dtype=REAL), torch.randn(4, 7, dtype=REAL))


@pytest.mark.parametrize("choice", range(6))
def test_functions_of_random_problems(choice: int) -> None:
    given = score_functions.random_score_function(choice, 2, 4, REAL, "cpu", torch.Generator())
    assert_as_autograd(given.fn, *given.tensors)


def test_activations() -> None:
    for fn in (F.relu, F.gelu, functools.partial(F.gelu, approximate="tanh"), F.silu):
        assert_as_autograd(lambda score, b, h, i, j, fn=fn: fn(score) + fn(score / 3))
    assert isinstance(formula_of(lambda score, b, h, i, j: F.relu(score, inplace=True)), Untraced)


def test_second_derivative() -> None:
    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score) * torch.sigmoid(score) + score**3

    pairs = inputs()
    derivative = traced(fn).partials().program
    twice = partials(used(derivative.instructions, derivative.outputs[:1]), (), ()).program
    score = pairs["score"].requires_grad_()
    [first] = torch.autograd.grad(fn(*pairs.values()).sum(), score, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), score)
    torch.testing.assert_close(run(twice, [*pairs.values()], ())[0], second)


@pytest.mark.parametrize("x", [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e300, 5e-324])
def test_odd_scores(x: float) -> None:
    """Values and derivatives at kinks, infinities and NaN are PyTorch's. That of a clamped NaN is 1 here, there 0."""
    for fn in (
        torch.abs, torch.relu, torch.sign, torch.floor,
        lambda s: s.clamp(-1, 1) if x == x else s, lambda s: torch.maximum(s, 0 * s),
        lambda s: torch.minimum(s, -s), lambda s: torch.where(s > 0, s, -math.inf), lambda s: s * 1 + 0, torch.rsqrt,
        lambda s: (s != s).to(s.dtype) * s, lambda s: s**2 - s**-1, torch.sqrt, torch.log,
    ):  # fmt: skip
        formula = traced(lambda score, b, h, i, j, fn=fn: fn(score))
        score = torch.full((1, 1, 1, 1), x, dtype=REAL, requires_grad=True)
        expected = fn(score)
        torch.testing.assert_close(run(formula.program, [score] * 5, ())[0], expected, equal_nan=True)
        [gradient] = torch.autograd.grad(expected, score)
        found = run(formula.partials().program, [score] * 5, ())[0].detach().broadcast_to(gradient.shape)
        torch.testing.assert_close(found, gradient, equal_nan=True)


def test_masks() -> None:
    """Functions of masks as in FlexAttention's documentation."""
    document, prefix = torch.tensor([0, 0, 1, 1, 1, 2]), torch.tensor([2, 3])

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    def window(b: Any, h: Any, i: Any, j: Any) -> Any:
        return causal(b, h, i, j) & (i - j <= 2)

    def documents(b: Any, h: Any, i: Any, j: Any, document: Any, prefix: Any) -> Any:
        return (document[i] == document[j]) & causal(b, h, i, j) | (j < prefix[b])

    def neighborhood(b: Any, h: Any, i: Any, j: Any) -> Any:
        inside = (i // 2 - j // 2).abs() <= 1
        return torch.logical_and(inside, b.new_ones((), dtype=torch.bool)) & (abs(i % 2 - j % 2) <= 1)

    pairs = inputs()
    indices = [pairs[name] for name in ("b", "h", "q_idx", "k_idx")]
    for fn, tensors in ((causal, ()), (window, ()), (documents, (document, prefix)), (neighborhood, ())):
        [found] = run(trace(fn, tensors, MASK_MOD)[0], [*pairs.values()], tensors)
        expected = fn(*indices, *tensors)
        assert found.dtype is torch.bool
        assert torch.equal(found.broadcast_to(expected.shape), expected)


def test_elements_outside_of_a_tensor() -> None:
    """Negative indices count from the end; past the end there is NaN, which shows."""
    table = torch.randn(4, dtype=REAL)
    formula = traced(lambda score, b, h, i, j, table: score + table[i - j], table)
    pairs = inputs()
    [found] = run(formula.program, [*pairs.values()], (table,))
    distance = (pairs["q_idx"] - pairs["k_idx"]).broadcast_to(found.shape)
    inside = (distance >= -4) & (distance < 4)
    expected = pairs["score"] + table[torch.where(inside, distance, 0)]
    torch.testing.assert_close(found, torch.where(inside, expected, torch.nan), equal_nan=True)


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda i, j, table: i - j, INT32),
        (lambda i, j, table: 3 * (i - j), INT64),
        (lambda i, j, table: (i * j).clamp(0, 9), INT32),
        (lambda i, j, table: i * j, INT64),
        (lambda i, j, table: torch.log(i + 1.0).int() + 16, INT32),
        (lambda i, j, table: torch.log(i + 1.0).long() + 16, INT64),
        (lambda i, j, table: i // 7 * 6, INT32),
        (lambda i, j, table: table[i] - table[j], INT64),
        (lambda i, j, table: torch.where(i < j, i + j, 5), INT32),
    ],
)
def test_integers_are_as_wide_as_they_must_be(fn: Callable[..., Any], kind: str) -> None:
    """Positions are below 2**30, and 32-bit arithmetic on them never wraps."""
    table = torch.zeros(9, dtype=torch.int32)
    program, _ = trace(lambda b, h, i, j, table: fn(i, j, table) > 3, (table,), MASK_MOD)
    compared = program.instructions[program.outputs[0]].operands[0]
    assert program.instructions[compared].kind == kind


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (score_functions.soft_bound, "tanh(score / 20) * 20"),
        (score_functions.relative_position, "score + tensor0[h] * (q_idx - k_idx)"),
        (lambda s, b, h, i, j, w: s - (w[h] - s) - 1, "score - (tensor0[h] - score) - 1"),
        (lambda s, b, h, i, j, w: torch.exp(s * w[h]) * (s * w[h]), "x0 = score * tensor0[h]\nexp(x0) * x0"),
        (lambda s, b, h, i, j, w: torch.where(i >= j, s.half(), -1), "where(q_idx >= k_idx, float16(score), -1)"),
        (lambda s, b, h, i, j, w: s + w[s.long() % w.shape[0]], "score + tensor0[int(score) % tensor0.shape[0]]"),
    ],
)  # fmt: skip
def test_text(fn: Callable[..., Any], expected: str) -> None:
    assert str(traced(fn, *[torch.ones(3)] * (fn is not score_functions.soft_bound))) == expected


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g


def branches(score: Any, b: Any, h: Any, i: Any, j: Any, table: Any) -> Any:
    return score if score > 0 else -score


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (branches, r"line \d+, `return score if score > 0 else -score`: a branch depends on a value; `torch\.where"),
        (lambda s, b, h, i, j, t: torch.ops.aten.tanh(s), "`aten.tanh` is not an operation"),
        (lambda s, b, h, i, j, t: StraightThrough.apply(s), "in a torch.autograd.Function"),
        (lambda s, b, h, i, j, t: torch.cumsum(s, 0), "`cumsum` is not an operation"),
        (lambda s, b, h, i, j, t: s.cumsum(0), "`cumsum` is not an operation"),
        (lambda s, b, h, i, j, t: s + t, "1 dimensions has 0 indices"),
        (lambda s, b, h, i, j, t: s + t[..., 0], "indexed by Ellipsis"),
        (lambda s, b, h, i, j, t: s + t[s], "what is no integer"),
        (lambda s, b, h, i, j, t: s ** t[h], "exponent is no constant"),
        (lambda s, b, h, i, j, t: s + torch.ones(3, dtype=torch.complex64)[h], "complex numbers"),
        (lambda s, b, h, i, j, t: s + torch.ones(3, dtype=torch.uint64)[h], "uint64"),
        (lambda s, b, h, i, j, t: s.to("cuda"), "another device"),
        (lambda s, b, h, i, j, t: 1.0, "does not return a real tensor"),
        (lambda s, b, h, i, j, t: s + float(t[0]), "the value of a tensor"),
        (lambda s, b, h, i, j, t: s + range(9)[i], "the value of a tensor"),
        (lambda s, b, h, i, j, t: s + undefined, "NameError"),  # noqa: F821 # pyright: ignore
        (lambda s, b, h, i, j, t: i > j, "does not return a real tensor"),
    ],
)
def test_what_cannot_be_traced(fn: Callable[..., Any], reason: str) -> None:
    found = formula_of(fn, (torch.ones(3),))
    assert isinstance(found, Untraced)
    assert re.search(reason, found.reason), found.reason


def test_formulas_are_values() -> None:
    """Equal functions have equal formulas, and text that has all of them: it is a part of the keys of compiled code."""

    def made() -> Formula:
        return traced(score_functions.distance_table, torch.zeros(2, 3))

    assert made() == made()
    assert hash(made()) == hash(made())
    assert pickle.loads(pickle.dumps(made())) == made()
    assert eval(repr(made()), vars(program) | {"Formula": Formula}) == made()
    assert Formula.of_key(made().key) == made()


def test_tensors_are_found_wherever_a_function_reads_them() -> None:
    """In nested closures, objects and tables of objects; the same one once."""
    weight, table = torch.rand(4, dtype=REAL), {"of": torch.rand(4, 7, dtype=REAL)}

    def inner(h: Tensor, j: Tensor) -> Tensor:
        return table["of"][h, j] * weight[h]

    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score * weight[h] + inner(h, j) * torch.tensor(0.5) + (2 * weight)[h]

    found = formula_of(fn)
    assert not isinstance(found, Untraced)
    formula, tensors = found
    assert len(tensors) == 3
    assert tensors[0] is weight
    assert tensors[1] is table["of"]
    pairs = [*inputs().values()]
    torch.testing.assert_close(formula(*pairs, *tensors), fn(*pairs))


def test_shared_parts_are_computed_once() -> None:
    program = traced(lambda s, b, h, i, j: torch.tanh(s) + torch.tanh(s * 1) * (0 + torch.tanh(s))).program
    assert [x.op for x in program.instructions].count("tanh") == 1


def test_constants_that_compare_equal_stay_apart() -> None:
    builder = Builder(())
    assert len({builder.constant(x) for x in (0.0, -0.0, 0, False)}) == 4
