"""Simpler formulas of pairs far from the diagonal, against the formula itself."""

import math
import operator
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import functions
from torch import Tensor

from flashtile import score_mods
from flashtile.expression import Formula, Untraced
from flashtile.expression.formula import formula_of
from flashtile.expression.purity import MASK_MOD
from flashtile.expression.sides import reach_of, sides

HEADS, FAR = 4, 5000
POSITIONS = torch.tensor([0, 1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 127, 128, 129, 130, 1023, 1024, 1025, 1026, FAR])
TABLE, WEIGHT = torch.randn(HEADS, 7), torch.randn(HEADS)
SIMPLER: dict[str, tuple[Callable[..., Tensor], int | None, str, str]] = {
    "sign": (lambda s, b, h, i, j: s - WEIGHT[h] * (i - j).abs(), 1,
             "score - tensor0[h] * (q_idx - k_idx)", "score - tensor0[h] * -(q_idx - k_idx)"),
    "clipped": (lambda s, b, h, i, j: s + TABLE[h, (j - i).clamp(-3, 3) + 3], 4,
                "score + tensor0[h, 0]", "score + tensor0[h, 6]"),
    "comparison": (lambda s, b, h, i, j: torch.where(j <= i + 2, s, -math.inf), 4, "score", "-inf"),
    "window": (lambda s, b, h, i, j: torch.where((i - j).abs() < 100, s, -math.inf), 128, "-inf", "-inf"),
    "remainder": (lambda s, b, h, i, j: s + (i - j) % 3, None, "", ""),
    "of rows": (lambda s, b, h, i, j: s + torch.where(i < 5, 1.0, 2.0), None, "", ""),
}  # fmt: skip


def traced(fn: Callable[..., Tensor], *tensors: Tensor) -> tuple[Formula, list[Tensor]]:
    found = formula_of(fn, tensors)
    assert not isinstance(found, Untraced), found
    return found


def check(formula: Formula, tensors: list[Tensor], reach: int) -> None:
    """Each side's formula and its derivative are the formula's, for pairs of that side."""
    rows, keys = (x.flatten() for x in torch.meshgrid(POSITIONS, POSITIONS, indexing="ij"))
    for side, own in zip(sides(formula, reach), (rows - keys >= reach, keys - rows >= reach), strict=True):
        i, j = rows[own], keys[own]
        score = torch.linspace(-3, 3, len(i), dtype=torch.float64)
        inputs = (score, torch.zeros_like(i), torch.arange(len(i)) % HEADS, i, j)
        results, wanted = (x.run(inputs, tensors).expand(len(i)) for x in (side, formula))
        assert torch.allclose(results, wanted, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", SIMPLER)
def test_simpler_formulas(name: str) -> None:
    fn, reach, before, after = SIMPLER[name]
    formula, tensors = traced(fn)
    assert reach_of(formula) == reach
    if reach is not None:
        assert [str(x) for x in sides(formula, reach)] == [before, after]
        check(formula, tensors, reach)


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
@pytest.mark.parametrize("reach", [1, 16])
def test_comparisons(name: str, reach: int) -> None:
    """Distances and positions are compared with numbers around the reach, in both orders."""
    comparison = getattr(operator, name)
    for number in (-reach - 1, -reach, 1 - reach, 0, reach - 1, reach, reach + 1):
        for fn in (
            lambda s, b, h, i, j, n=number: torch.where(comparison(i - j, n), s, -s),
            lambda s, b, h, i, j, n=number: torch.where(comparison(n, j - i), s, -s),
            lambda s, b, h, i, j, n=number: torch.where(comparison(j + n, i), s, -s),
            lambda s, b, h, i, j, n=number: s + (i - j).clamp(max=n) * torch.sign(j - i - n) + (j - i + n).abs(),
        ):
            check(*traced(fn), reach)


def test_buckets_of_t5() -> None:
    """All distances from the largest one on are in one bucket, whatever a backend's logarithm rounds to."""
    table = torch.randn(32, HEADS)
    score_mod = score_mods.t5_buckets(table, max_distance=128, bidirectional=True)
    formula, tensors = traced(score_mod.fn, *score_mod.tensors)
    reach = reach_of(formula)
    assert reach == 128
    assert not any("log" in str(x) or "q_idx" in str(x) for x in sides(formula, reach))
    check(formula, tensors, reach)


def test_elements_of_pairs_on_both_sides() -> None:
    """A table whose length is not known is read for each pair, however far from the diagonal."""
    table = torch.randn(HEADS, 257)
    score_mod = score_mods.relative_table(table)
    assert reach_of(traced(score_mod.fn, *score_mod.tensors)[0]) is None
    clipped, _ = traced(lambda s, b, h, i, j, x: s + x[h, (i - j + 128).clamp(0, 256)], table)
    assert reach_of(clipped) == 128


def test_masks() -> None:
    found = formula_of(lambda b, h, i, j: (i >= j) & (i - j < 64), role=MASK_MOD)
    assert not isinstance(found, Untraced)
    assert reach_of(found[0]) == 64
    assert [str(x) for x in sides(found[0], 64)] == ["False", "False"]
    assert [str(x) for x in sides(found[0], 1)] == ["q_idx - k_idx < 64", "False"]


@given(functions(), st.sampled_from([1, 2, 16, 1024]))
@settings(max_examples=60, deadline=None)
def test_random_formulas(fn: Callable[..., Tensor], reach: int) -> None:
    formula, tensors = traced(fn, WEIGHT, TABLE)
    check(formula, tensors, reach)
