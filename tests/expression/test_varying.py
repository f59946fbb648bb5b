"""Numbers of functions that change from call to call: how many kernels they need, and what stays a constant."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from calls import call_of
from torch import Tensor

import flashtile
from flashtile import MaskMod, ScoreMod
from flashtile.call.call import Call
from flashtile.expression import modifier, registry, varying
from flashtile.expression.blocks.evaluation import HIDDEN, Blocks, block_visibility, positions
from flashtile.expression.formula import Formula
from flashtile.expression.registry import MANY_FUNCTIONS

Q, K, V = (torch.randn(1, 2, 40, 8) for _ in range(3))
STEPS = 5


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(varying, "_seen", {})
    modifier._with_arguments.cache_clear()
    yield
    modifier._with_arguments.cache_clear()


def tempered(n: int) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: torch.tanh(s / (1.5 + 0.1 * n)) * 2.0


def after(n: int) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: torch.where(3 * i + j > 20 + n, s, 0.5 * s)


def two_numbers(n: int) -> Callable[..., Tensor]:
    return lambda s, b, h, i, j: torch.where(j < 30 - n, s * (1.5 + n), s - 7.25)


def up_to(n: int) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (j < 30 + n) | (i == j)


def near_up_to(n: int) -> Callable[..., Tensor]:
    return lambda b, h, i, j: (i - j <= 3 + n) & ((j - i).abs() < 20 - n) & (j - 2 * i < 30 - n)


def functions(n: int) -> dict[str, Any]:
    return {
        "a temperature": {"score_mod": tempered(n)},
        "an integer": {"score_mod": after(n)},
        "both": {"score_mod": two_numbers(n)},
        "a ScoreMod": {"score_mod": ScoreMod(tempered(n))},
        "a ScoreMod of integers": {"score_mod": ScoreMod(after(n))},
        "a length": {"mask": up_to(n)},
        "a MaskMod": {"mask": MaskMod(up_to(n))},
        "a band and a length": {"mask": near_up_to(n)},
        "both functions": {"score_mod": tempered(n), "mask": MaskMod(up_to(n))},
    }


def called(arguments: dict[str, Any], q: Tensor = Q, k: Tensor = K, v: Tensor = V) -> Call:
    rest = arguments.copy()
    return call_of({"q": q, "k": k, "v": v, "mask": rest.pop("mask", None)}, rest)


def keys_of(arguments: dict[str, Any], dtype: torch.dtype = torch.float32) -> list[str]:
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    settings = called(arguments, q, k, v).settings
    return [key for key in (settings.score_mod, settings.mask_mod) if key is not None]


def expected_of(arguments: dict[str, Any], q: Tensor = Q) -> Tensor:
    """The output by PyTorch, with the functions as they are."""
    k, v = (x.to(q.dtype) for x in (K, V))
    indices = [torch.arange(n).view(-1, *[1] * ones) for n, ones in ((1, 3), (2, 2), (40, 1), (40, 0))]
    scores = q @ k.mT * 8**-0.5
    if "score_mod" in arguments:
        scores = getattr(arguments["score_mod"], "fn", arguments["score_mod"])(scores, *indices)
    if "mask" in arguments:
        visible = getattr(arguments["mask"], "fn", arguments["mask"])(*indices)
        scores = scores.masked_fill(~visible, -torch.inf)
    return torch.softmax(scores, -1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", functions(0))
def test_a_number_that_changes_compiles_twice(name: str, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    seen = []
    for n in range(STEPS):
        arguments = functions(n)[name]
        seen.append(tuple(keys_of(arguments, dtype)))
        out = flashtile.attention(q, k, v, **arguments, backend="tiled")
        torch.testing.assert_close(out, expected_of(arguments, q))
    assert len(set(seen)) == 2
    assert keys_of(functions(0)[name], dtype) == list(seen[0])  # whose kernels are there
    for key in {key for keys in seen for key in keys}:
        assert Formula.of_key(key).key == key  # a program that contains it can be loaded


def test_kernels_that_read_numbers() -> None:
    keys_of({"score_mod": two_numbers(0), "mask": up_to(0)})  # the values that would be constants
    for n in range(1, 4):
        arguments: dict[str, Any] = {"score_mod": two_numbers(n), "mask": up_to(n)}
        torch.testing.assert_close(flashtile.attention(Q, K, V, **arguments, backend="cpu"), expected_of(arguments))


def test_a_number_that_never_changes_stays_a_constant() -> None:
    keys = [keys_of({"score_mod": tempered(n)}) for n in range(2)]
    assert "2.0" in keys[1][0]
    assert Formula.of_key(keys[1][0]).tensors == (("float32", 0),)


def test_numbers_of_a_band_stay_a_window() -> None:
    """Which no kernel is compiled for."""
    windows = set()
    for n in range(STEPS):
        call = called({"mask": lambda b, h, i, j, n=n: (i >= j) & (i - j <= n)})
        assert call.settings.mask_mod is None
        windows.add((call.settings.window_left, call.settings.window_right))
    assert windows == {(n, 0) for n in range(STEPS)}


@pytest.mark.parametrize(
    "made",
    [
        lambda n: {"mask": lambda b, h, i, j: i // (5 + n) == j // (5 + n)},
        lambda n: {"mask": lambda b, h, i, j: (i * j) % (5 + n) < 3},
        lambda n: {"score_mod": lambda s, b, h, i, j: s + (i - j).clamp(-6 - n, 6 + n).abs().sqrt().exp().log()},
    ],
    ids=["quotient", "remainder", "table"],
)
def test_integers_that_kernels_need_as_constants(made: Callable[[int], Any]) -> None:
    for n in range(3):
        [key] = keys_of(made(n))
        assert Formula.of_key(key).tensors == ()
        torch.testing.assert_close(flashtile.attention(Q, K, V, **made(n), backend="tiled"), expected_of(made(n)))


def test_integers_that_decide_what_a_function_does() -> None:
    def chosen(n: int) -> Callable[..., Tensor]:
        if n % 2:
            return lambda s, b, h, i, j: sum((s * 0.1,) * n, s)  # type: ignore[arg-type, return-value]
        return lambda s, b, h, i, j: s - n

    keys = set()
    for n in range(2 * STEPS):
        arguments: dict[str, Any] = {"score_mod": chosen(n)}
        keys.update(keys_of(arguments))
        out = flashtile.attention(Q, K, V, **arguments, backend="tiled")
        torch.testing.assert_close(out, expected_of(arguments))
    assert len(keys) == STEPS + 3  # each odd number has a sum of its own; of the others, 0 subtracts nothing


def test_blocks_behind_a_length_that_changes_are_skipped() -> None:
    blocks = Blocks(torch.arange(1), torch.arange(2), positions(0, 40, 8, Q.device), positions(0, 40, 8, Q.device))
    for n in range(3):
        call = called({"mask": lambda b, h, i, j, n=n: (j < 15 - n) & (i >= 0)})
        assert call.settings.mask_mod is not None
        formula = registry.mask_mod_formula(call.settings.mask_mod)
        assert isinstance(formula, Formula)
        states = block_visibility(formula, call.tensors.score_mod_tensors, blocks, torch.float32)
        assert len(call.tensors.score_mod_tensors) == (n > 0)
        assert (states[..., 2:] == HIDDEN).all()


def test_formulas_of_many_numbers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_functions", {})
    first = ScoreMod(tempered(-1))
    for n in range(MANY_FUNCTIONS + 10):
        ScoreMod(tempered(n))
    assert len(registry._functions) == MANY_FUNCTIONS
    flashtile.attention(Q, K, V, score_mod=first, backend="tiled")  # whose key has all of it
