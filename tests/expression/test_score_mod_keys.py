"""Which functions of score_mod are the same, in this process and in others, and what they keep alive."""

import copy
import functools
import gc
import importlib
import os
import pickle
import subprocess
import sys
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import ArgumentError, AttentionError, MaskMod, ScoreMod
from flashtile.call.call import Call, Settings, Tensors
from flashtile.dispatch.operators import OPERATORS
from flashtile.expression import registry

Q, K, V = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)


def scaled_by(factor: float) -> Callable[..., Tensor]:
    return lambda score, b, h, i, j: score * factor


def test_equal_functions_are_one() -> None:
    """A lambda written in a training loop is not a new program at every step."""
    assert ScoreMod(scaled_by(2.0)).key == ScoreMod(scaled_by(2.0)).key
    assert ScoreMod(scaled_by(2.0)).key != ScoreMod(scaled_by(3.0)).key


def test_closures_and_defaults_that_differ_are_not_confused() -> None:
    for factor in (2.0, 3.0, 2):
        out = flashtile.attention(Q, K, V, score_mod=scaled_by(factor))
        torch.testing.assert_close(out, flashtile.attention(Q, K, V, scale=factor * 8**-0.5))
        out = flashtile.attention(Q, K, V, score_mod=lambda score, b, h, i, j, f=factor: score * f)
        torch.testing.assert_close(out, flashtile.attention(Q, K, V, scale=factor * 8**-0.5))
        out = flashtile.attention(Q, K, V, score_mod=functools.partial(lambda f, score, *_: score * f, factor))
        torch.testing.assert_close(out, flashtile.attention(Q, K, V, scale=factor * 8**-0.5))


def test_signed_zeros_are_two_functions() -> None:
    assert ScoreMod(scaled_by(0.0)).key != ScoreMod(scaled_by(-0.0)).key


SOURCE = """
import math, torch
SLOPE = {slope}
def helper(x): return x * {factor}
def fn(score, b, h, i, j): return torch.sinh(helper(score)) + SLOPE * abs(i - j) * math.pi
"""


def untraceable(factor: float) -> Callable[..., Tensor]:
    """A function of an operation that formulas do not have."""
    return lambda score, b, h, i, j: torch.sinh(score) * factor


def made_of(source: str, **values: Any) -> ScoreMod:
    names: dict[str, Any] = {}
    exec(source.format(**values), names)
    return ScoreMod(names["fn"])


def test_keys_follow_from_code_and_constants() -> None:
    """The key of a function that cannot be traced depends on it and on everything it calls and reads, not on the order
    of creation.
    """
    first = made_of(SOURCE, slope=0.5, factor=2)
    others = [made_of(SOURCE, slope=x, factor=y).key for x, y in ((0.6, 2), (0.5, 3), (0.5, 2.0))]
    assert made_of(SOURCE, slope=0.5, factor=2).key == first.key
    assert len({first.key, *others}) == 4
    table = SOURCE.replace("SLOPE = {slope}", "SLOPE = torch.tensor({slope})")
    assert made_of(table, slope=0.5, factor=2).key != made_of(table, slope=0.5, factor=2).key


def test_a_function_that_calls_itself_has_a_key() -> None:
    def of(depth: int) -> ScoreMod:
        def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, n: int = depth) -> Tensor:
            return torch.sinh(score) if n == 0 else fn(score, b, h, i, j, n - 1)

        return ScoreMod(fn)

    assert of(1).key == of(1).key != of(2).key


def test_a_closure_that_changes_is_another_function() -> None:
    """Two equal functions, one of which now has another constant."""

    def counted() -> tuple[Callable[..., Tensor], Callable[[], None]]:
        factor = 2.0

        def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * factor

        def change() -> None:
            nonlocal factor
            factor = 3.0

        return fn, change

    (first, _), (second, change_second) = counted(), counted()
    mods = ScoreMod(first), ScoreMod(second)
    change_second()
    for mod, scale in ((mods[0], 2.0), (ScoreMod(first), 2.0), (ScoreMod(second), 3.0)):
        out = flashtile.attention(Q, K, V, score_mod=mod)
        torch.testing.assert_close(out, flashtile.attention(Q, K, V, scale=scale * 8**-0.5))


@pytest.mark.parametrize("make", [ScoreMod, ScoreMod.of])
def test_a_variable_without_a_value_is_refused(make: Callable[..., ScoreMod]) -> None:
    def mod() -> ScoreMod:
        found = make(lambda score, b, h, i, j: score * later)
        later = 2.0
        return found, later  # type: ignore[return-value]

    with pytest.raises(ArgumentError, match="`later`, which it reads, has none yet"):
        mod()


CHILD = """
import pickle, sys, torch, flashtile
from score_functions_of_a_module import scaled_by
for _ in range(2):
    flashtile.ScoreMod(lambda score, b, h, i, j: score)
mod, key, (q, k, v), out, weights, exported = pickle.load(sys.stdin.buffer)
assert torch.equal(flashtile.attention(q, k, v, score_mod=mod), out)
assert flashtile.ScoreMod(scaled_by(2.0)).key == key
program = torch.export.load(sys.argv[1]).module()
assert torch.equal(program(q, k, v, *weights), exported)
"""
MODULE = """
def module_level(score, b, h, i, j, weight): return score * weight[h]
def scaled_by(factor): return lambda score, b, h, i, j: score * (factor if factor in {"a", "b", 2.0} else 0)
"""


class Program(torch.nn.Module):
    """A score_mod and a mask function that are made inside, of tensors that are the program's inputs."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, lengths: Tensor) -> Tensor:
        mod = ScoreMod(lambda score, b, h, i, j, w: score * w[h] + (i - j), (weight,))
        mask = MaskMod(lambda b, h, i, j, n: (j < n[b]) & (j != i + 1), (lengths,))
        return flashtile.attention(q, k, v, score_mod=mod, mask=mask)


def test_a_spawned_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets functions by their names, finds the same keys, and runs an exported program with formulas in it."""
    (tmp_path / "score_functions_of_a_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    functions = importlib.import_module("score_functions_of_a_module")
    mod = ScoreMod(functions.module_level, (torch.rand(4),))
    weights = torch.rand(4), torch.tensor([7, 3])
    with torch.no_grad():
        exported = Program()(Q, K, V, *weights)
        torch.export.save(torch.export.export(Program(), (Q, K, V, *weights)), tmp_path / "program.pt2")
    out = flashtile.attention(Q, K, V, score_mod=mod)
    given = (mod, ScoreMod(functions.scaled_by(2.0)).key, (Q, K, V), out, weights, exported)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *sys.path))), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "program.pt2")]
    child = subprocess.run(command, input=pickle.dumps(given), env=environment, capture_output=True)
    assert child.returncode == 0, child.stderr.decode()


@pytest.mark.parametrize("traced", [True, False])
def test_functions_without_a_name_are_copied(traced: bool) -> None:
    """And pickled, if they have a formula."""
    weight, fn = torch.rand(4), torch.tanh if traced else torch.sinh
    for mod in (
        ScoreMod(lambda score, b, h, i, j: fn(score)),
        ScoreMod.of(lambda score, b, h, i, j: fn(score) * weight[h]),
        ScoreMod(functools.partial(lambda score, b, h, i, j: fn(score) + 1)),
    ):
        copies = [copy.copy(mod), copy.deepcopy(mod)]
        if traced:
            copies.append(pickle.loads(pickle.dumps(mod)))
        else:
            with pytest.raises(pickle.PicklingError, match="a function at the top level of a module"):
                pickle.dumps(mod)
        for copied in copies:
            assert copied.key == mod.key
            found, expected = (flashtile.attention(Q, K, V, score_mod=x, backend="tiled") for x in (copied, mod))
            assert torch.equal(found, expected)


def test_a_program_whose_function_this_process_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    mod = ScoreMod(untraceable(2.0))
    settings = Settings(scale=1.0, score_mod=mod.key, backend="tiled")
    operators, call = OPERATORS["dense"], Call(Tensors(Q, K, V), settings)
    out, _ = operators.forward(*operators.arguments(call))
    monkeypatch.setattr(registry, "_functions", {})  # as if in another process
    ScoreMod(untraceable(3.0))
    with pytest.raises(AttentionError, match="made in this process before the program runs"):
        operators.forward(*operators.arguments(call))
    ScoreMod(untraceable(2.0))
    assert torch.equal(operators.forward(*operators.arguments(call))[0], out)
    monkeypatch.setattr(registry, "_functions", {})
    settings = call.settings._replace(score_mod=ScoreMod(Model().modify).key)
    monkeypatch.setattr(registry, "_functions", {})
    with pytest.raises(AttentionError, match="reads no objects but constants"):
        operators.forward(*operators.arguments(call._replace(settings=settings)))


def test_a_program_contains_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a process that has never seen the function runs it."""
    weight = torch.rand(4)
    mod = ScoreMod.of(lambda score, b, h, i, j: score * weight[h] + (i - j))
    expected = flashtile.attention(Q, K, V, score_mod=mod, scale=1.0)
    monkeypatch.setattr(registry, "_functions", {})  # as if in another process
    operators = OPERATORS["dense"]
    call = Call(Tensors(Q, K, V, score_mod_tensors=[weight]), Settings(scale=1.0, score_mod=mod.key))
    assert torch.equal(operators.forward(*operators.arguments(call))[0], expected)


class Model:
    def modify(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.sinh(score)


def test_a_method_is_one_function() -> None:
    model = Model()
    assert ScoreMod(model.modify).key == ScoreMod(model.modify).key
    assert ScoreMod(model.modify).key != ScoreMod(Model().modify).key


class Named(float):
    def __repr__(self) -> str:
        return "Named"


class Sized(tuple):
    size: float


def with_attribute(factor: float) -> Callable[..., Tensor]:
    def fn(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.sinh(score) * fn.factor  # type: ignore[attr-defined]

    fn.factor = factor  # type: ignore[attr-defined]
    return fn


def of_module(factor: float) -> Callable[..., Tensor]:
    config = types.ModuleType("config")
    config.factor = factor  # type: ignore[attr-defined]
    return lambda score, b, h, i, j: torch.sinh(score) * config.factor


def of_tuple(factor: float) -> Callable[..., Tensor]:
    config = Sized((1, 2))
    config.size = factor
    return lambda score, b, h, i, j: torch.sinh(score) * config.size


@pytest.mark.parametrize("make", [lambda x: untraceable(Named(x)), with_attribute, of_module, of_tuple])
def test_values_that_look_alike_are_not_confused(make: Callable[[float], Callable[..., Tensor]]) -> None:
    """Subclasses of numbers and tuples, attributes of functions, and modules of one name."""
    mods = [ScoreMod(make(x)) for x in (1.0, 3.0)]
    assert mods[0].key != mods[1].key
    for mod, factor in zip(mods, (1.0, 3.0), strict=True):
        found = flashtile.attention(Q, K, V, score_mod=mod, backend="tiled")
        assert torch.equal(found, flashtile.attention(Q, K, V, score_mod=untraceable(factor), backend="tiled"))


@pytest.mark.parametrize(
    "mod_of",
    [
        lambda model: model.modify, lambda model: lambda *x, models=[model]: torch.sinh(x[0]),
        lambda model: ScoreMod(model.modify), lambda model: ScoreMod(lambda *x: models_first([model], *x)),
    ],
)  # fmt: skip
def test_functions_keep_no_objects(mod_of: Callable[["Model"], Any]) -> None:
    """A function lives until the last backward pass that needs it."""
    q = Q.clone().requires_grad_()
    model = Model()
    alive = weakref.ref(model)
    out = flashtile.attention(q, K, V, score_mod=mod_of(model), backend="tiled")
    del model
    gc.collect()
    out.sum().backward()
    assert q.grad is not None
    del out
    gc.collect()
    assert alive() is None


def models_first(models: list["Model"], *arguments: Tensor) -> Tensor:
    return models[0].modify(*arguments)
