"""Keys of formulas that come from files: each is a formula, or is refused."""

import json
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile import AttentionError, MaskMod, ScoreMod, score_mods
from flashtile.backend.gpu import formula as gpu_formula
from flashtile.call.call import Call, Settings, Tensors
from flashtile.dispatch.operators import OPERATORS
from flashtile.expression import Formula
from flashtile.expression.formula import PREFIX
from flashtile.expression.torch_code import run
from flashtile.testing import mask_functions, score_functions

EVIL = "score\nprint('from a key')\ndef rest(score, b, h, q_idx, k_idx, captured):\n    y = score"


def key_of(tensors: Any, instructions: Any, outputs: Any) -> str:
    return PREFIX + json.dumps([tensors, instructions, outputs])


SCORE, ROW = ["input", "real", [], "score"], ["input", "int32", [], "q_idx"]


@pytest.mark.parametrize(
    "key",
    [
        key_of([], [SCORE, ["input", "real", [], EVIL], ["add", "real", [0, 1], None]], [2]),
        key_of([], [SCORE, ["constant", "real", [], "__import__('os')"], ["add", "real", [0, 1], None]], [2]),
        key_of([], [SCORE, ["__class__", "real", [0], None]], [1]),
        key_of([], [SCORE, ["round", "real", [0], "float32) or print("]], [1]),
        key_of([["float32", 1]], [ROW, ["load", "real", [0], "0; print()"]], [1]),
        key_of([["float32", 1]], [ROW, ["load", "real", [0], 1]], [1]),
        key_of([["float32", 2]], [ROW, ["load", "real", [0], 0]], [1]),
        key_of([["float32", -1]], [SCORE], [0]),
        key_of([["load", 1]], [SCORE], [0]),
        key_of([["int8", 1]], [ROW, ["load", "real", [0], 0]], [1]),
        key_of([["float32", 1]], [SCORE, ["load", "real", [0], 0]], [1]),
        key_of([], [SCORE, ["add", "real", [0, 2], None], SCORE], [1]),
        key_of([], [SCORE, ["add", "real", [0, -1], None]], [1]),
        key_of([], [SCORE, ["add", "real", [0, True], None]], [1]),
        key_of([], [SCORE, ["add", "real", [0], None]], [1]),
        key_of([], [SCORE, ["add", "int32", [0, 0], None]], [1]),
        key_of([], [SCORE, ["and_", "real", [0, 0], None]], [1]),
        key_of([], [SCORE, ROW, ["add", "real", [0, 1], None]], [2]),
        key_of([], [ROW, ["floordiv", "int32", [0, 0], True], ["cast", "real", [1], None]], [2]),
        key_of([], [ROW, ["mul", "int32", [0, 0], None], ["cast", "real", [1], None]], [2]),
        key_of([], [["constant", "int32", [], "99999999999"], ["cast", "real", [0], None]], [1]),
        key_of([], [["input", "int32", [], "score"], ["cast", "real", [0], None]], [1]),
        key_of([], [SCORE], [1]),
        key_of([], [SCORE], []),
        key_of([], [ROW], [0]),
        key_of([], [SCORE, ["gt", "bool", [0, 0], None]], [1]),
        key_of([["float32", 1]], [SCORE, ["size", "int32", [], [0, 1]]], [0]),
        key_of({}, [SCORE], [0]),
        PREFIX, PREFIX + "[]", PREFIX + "[" * 100000, PREFIX + "1e999", PREFIX + "null",
    ],
)  # fmt: skip
def test_keys_that_are_refused(key: str) -> None:
    q = torch.randn(1, 1, 4, 8)
    operators = OPERATORS["dense"]
    call = Call(Tensors(q, q, q), Settings(scale=1.0, score_mod=key))
    with pytest.raises(AttentionError, match="a formula that cannot be read"):
        operators.forward(*operators.arguments(call))


def test_the_key_of_the_other_function() -> None:
    q, operators = torch.randn(1, 1, 4, 8), OPERATORS["dense"]
    score, mask = ScoreMod(lambda s, *_: s * 2).key, MaskMod(lambda b, h, i, j: i >= j).key
    for settings in (Settings(scale=1.0, score_mod=mask), Settings(scale=1.0, mask_mod=score)):
        with pytest.raises(AttentionError, match="the formula of the other one"):
            operators.forward(*operators.arguments(Call(Tensors(q, q, q), settings)))


def mods() -> list[ScoreMod | MaskMod]:
    generator = torch.Generator()
    scores = [score_functions.random_score_function(n, 2, 4, torch.float32, "cpu", generator) for n in range(12)]
    masks = [mask_functions.random_mask_function(n, 2, 4, "cpu", generator) for n in range(8)]
    ready = [score_mods.t5_buckets(torch.zeros(32, 4)), score_mods.relative_table(torch.zeros(4, 9))]
    found: list[ScoreMod | MaskMod] = [*ready, *(ScoreMod(x.fn, x.tensors) for x in scores)]
    return [*found, *(MaskMod(x.fn, x.tensors) for x in masks)]


def test_keys_of_functions_are_read() -> None:
    for mod in mods():
        formula = Formula.of_key(mod.key)
        assert formula.key == mod.key


WORDS = re.compile(r"[A-Za-z_]\w*")


def mutated(draw: random.Random, x: Any, others: list[Any]) -> Any:
    """A value of a key with something else in one place of it."""
    if isinstance(x, list) and x and draw.random() < 0.9:
        n = draw.randrange(len(x))
        change = draw.random()
        if change < 0.1:
            return [*x[:n], *x[n + 1 :]]
        if change < 0.2:
            return [*x[:n], x[n], *x[n:]]
        return [*x[:n], mutated(draw, x[n], others), *x[n + 1 :]]
    if isinstance(x, int) and draw.random() < 0.5:
        return x + draw.choice((-1, 1))
    return draw.choice(others)


@pytest.mark.parametrize("seeds", [range(400)], ids=str)
def test_changed_keys(seeds: range) -> None:
    """Each is refused, or is a formula that runs; code for GPUs has no text of it that no other formula has."""
    contents = [json.loads(mod.key.removeprefix(PREFIX)) for mod in mods()]
    values = [None, True, -1, 0, 3, 2**40, 1.5, "", EVIL, [], [0], {}, "nan", "0.5"]
    names = ["real", "int32", "int64", "bool", "score", "constant", "load", "size", "cast", "add", "where", "floordiv"]
    others = [*values, *names, "round", "float16", "float64"]
    known = {word for x in contents for word in words_of(Formula.of_key(PREFIX + json.dumps(x)))}
    accepted = 0
    for seed in seeds:
        draw = random.Random(seed)
        key = PREFIX + json.dumps(mutated(draw, draw.choice(contents), others))
        try:
            formula = Formula.of_key(key)
        except AttentionError:
            continue
        accepted += 1
        assert Formula.of_key(formula.key) == formula
        assert words_of(formula) <= known | {"float16", "float64", "int64", "to", "nan", "inf"}
        sizes = [torch.zeros((3,) * ndim, dtype=getattr(torch, dtype)) for dtype, ndim in formula.tensors]
        index = torch.arange(4)
        [result] = run(formula.program, [index.float(), index, index, index, index], sizes)
        assert result.dtype is (torch.bool if formula.is_mask else torch.float32)
    assert accepted > 10


def words_of(formula: Formula) -> set[str]:
    found: Tensor | Any = gpu_formula.source("fn", formula)
    return set(WORDS.findall(found.text))
