"""Bare functions of pairs in repeated calls: not traced again while all that they read is the same."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from not_normalized import not_normalized
from torch import Tensor

import flashtile
from flashtile.dispatch import fast_path
from flashtile.expression.reads import Reads

NUMBER, TABLE = 2.0, torch.rand(24)
HOLDER = SimpleNamespace(scale=2.0)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fast_path.forget()
    yield
    fast_path.forget()


def doubled(x: Any) -> Any:
    return x * 2


def plain() -> Callable[..., Any]:
    return lambda score, b, h, i, j: torch.where(j <= i, score * 2, score - 1)


def with_closure(number: Any = 3.0, table: Tensor = TABLE) -> Callable[..., Any]:
    return lambda score, b, h, i, j: score * number + table[j]


def with_globals() -> Callable[..., Any]:
    return lambda score, b, h, i, j: score * NUMBER + TABLE[j] * TABLE.shape[0]


def run(fn: Callable[..., Any], backend: str = "auto") -> Tensor:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 24, 16)
    return flashtile.attention(q, k, v, score_mod=fn, backend=backend)


@pytest.mark.parametrize("make", [plain, with_closure, with_globals])
def test_not_traced_again(make: Callable[..., Callable[..., Any]]) -> None:
    for _ in range(2):
        run(make())
    with not_normalized():
        out = run(make())
    torch.testing.assert_close(out, run(make(), "reference"))
    if make is not plain:
        TABLE.mul_(2)  # in place: the values of now count
        with not_normalized():
            out = run(make())
        torch.testing.assert_close(out, run(make(), "reference"))


def test_masks_and_gradients() -> None:
    table, gradients = torch.rand(24, requires_grad=True), []
    for n in range(4):
        with not_normalized() if n > 1 else mock.MagicMock():
            out = flashtile.attention(
                *torch.ones(3, 1, 2, 24, 16),
                score_mod=with_closure(1.0, table),
                mask=lambda b, h, i, j: (j <= i) | (j < int(NUMBER)),
            )
        (gradient,) = torch.autograd.grad(out.square().sum() + out[..., :3, :].sum(), table, allow_unused=True)
        assert gradient is not None
        gradients.append(gradient)
    torch.testing.assert_close(gradients[1:], gradients[:1] * 3)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], Callable[..., Any]]] = {
    "number": lambda _: with_closure(4.0),
    "type": lambda _: with_closure(3),
    "table": lambda _: with_closure(3.0, torch.rand(24)),
    "dtype": lambda _: with_closure(3.0, torch.rand(24).double()),
    "shape": lambda _: with_closure(3.0, torch.rand(25)),
    "a tensor for a number": lambda _: with_closure(torch.tensor(2.0)),
    "global": lambda patch: patch.setitem(globals(), "NUMBER", 5.0) or with_globals(),  # type: ignore[func-returns-value]
    "global table": lambda patch: patch.setitem(globals(), "TABLE", torch.rand(30)) or with_globals(),  # type: ignore[func-returns-value]
    "code": lambda _: lambda score, b, h, i, j: score + 5,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_it_reads_has_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        run(with_closure())
        run(with_globals())
    fn = CHANGES[change](monkeypatch)
    torch.testing.assert_close(run(fn), run(fn, "reference"))


def test_zeros_of_both_signs() -> None:
    function: Callable[[float], Any] = lambda zero: lambda score, b, h, i, j: score + 1 / (score * 0 + zero)  # noqa: E731
    fn = function(0.0)
    reads = Reads.of(fn, ())
    assert reads is not None
    assert reads.tensors(function(0.0)) == ()
    assert reads.tensors(function(-0.0)) is None
    assert reads.tensors(function(0)) is None


OBJECT, CALLS = HOLDER, [0]


def counting(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    CALLS[0] += 1
    return score


LOOKS_FURTHER: dict[str, Any] = {
    "attribute": lambda score, b, h, i, j: score * OBJECT.scale,
    "function": lambda score, b, h, i, j: doubled(score),
    "state of torch": lambda score, b, h, i, j: score * (2 if torch.is_inference_mode_enabled() else 1),
    "list": lambda score, b, h, i, j: score * CALLS[0],
    "effect": counting,
    "inner function": lambda score, b, h, i, j: (lambda x: x * 2)(score),
    "default": lambda score, b, h, i, j, scale=2.0: score * scale,
}


@pytest.mark.parametrize("name", LOOKS_FURTHER)
def test_functions_that_look_further(name: str) -> None:
    assert Reads.of(LOOKS_FURTHER[name], ()) is None
    first = run(LOOKS_FURTHER[name])
    for _ in range(3):
        torch.testing.assert_close(run(LOOKS_FURTHER[name]), first)
    with not_normalized(), pytest.raises(AssertionError, match="looked at"):
        run(LOOKS_FURTHER[name])


def test_a_tensor_of_which_only_the_shape_counts() -> None:
    table = torch.rand(7)
    fn: Any = lambda score, b, h, i, j: score * table.shape[0]  # noqa: E731
    assert Reads.of(fn, ()) is None
    for n in (7, 7, 7, 9):
        table = torch.rand(n)
        torch.testing.assert_close(run(fn), run(fn, "reference"))
