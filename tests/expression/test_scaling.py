"""Formulas that commute with factors of the score, and those that are one."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashtile.expression import Formula, Untraced
from flashtile.expression.formula import formula_of
from flashtile.expression.scaling import is_head_factor, is_homogeneous

X = torch.tensor([0.5, -2.0, 3.0])
FACTORS: dict[str, Callable[..., Tensor]] = {
    "the score": lambda s, b, h, q, k: s,
    "constant": lambda s, b, h, q, k: 3 * s,
    "loaded": lambda s, b, h, q, k: -(s * X[h]) / X[b],
    "computed": lambda s, b, h, q, k: s * torch.tanh(X[h] + b),
}
HOMOGENEOUS: dict[str, Callable[..., Tensor]] = {
    "by row": lambda s, b, h, q, k: X[q % 3] * s,
    "hidden": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf),
    "of the head, hidden": lambda s, b, h, q, k: torch.where(h > 0, s, -math.inf),
    "zero": lambda s, b, h, q, k: torch.where(q >= k, s, 0.0),
    "sum": lambda s, b, h, q, k: s * X[h] + s.abs() - s * 0.0,
    "leaky": lambda s, b, h, q, k: torch.maximum(s, s / 10),
}
OTHERS: dict[str, Callable[..., Tensor]] = {
    "added": lambda s, b, h, q, k: s + X[h],
    "square": lambda s, b, h, q, k: s * s,
    "quotient": lambda s, b, h, q, k: X[h] / s,
    "ratio": lambda s, b, h, q, k: s / (s + s),
    "no score": lambda s, b, h, q, k: s * 0 + X[h] * (q - k),
    "finite": lambda s, b, h, q, k: torch.where(q >= k, s, -1e9),
    "condition": lambda s, b, h, q, k: torch.where(s > 1, s, -s),
    "tanh": lambda s, b, h, q, k: torch.tanh(s),
    "exp": lambda s, b, h, q, k: s * torch.exp(s),
    "rounded": lambda s, b, h, q, k: s.to(torch.bfloat16).float(),
    "clamped": lambda s, b, h, q, k: s.clamp(max=3.0),
}


@pytest.mark.parametrize("name", [*FACTORS, *HOMOGENEOUS, *OTHERS])
def test_kinds(name: str) -> None:
    """The kinds are right, and scores times 5 show the same."""
    fn = (FACTORS | HOMOGENEOUS | OTHERS)[name]
    traced = formula_of(fn)
    assert not isinstance(traced, Untraced)
    formula, tensors = traced
    assert isinstance(formula, Formula)
    assert is_head_factor(formula) == (name in FACTORS)
    assert is_homogeneous(formula) == (name not in OTHERS)
    score = torch.tensor([-7.3, -1.5, 0.3, 2.0, 40.1], dtype=torch.float64)
    indices = [
        torch.tensor([1, 0, 2, 1, 0]),
        torch.tensor([0, 1, 2, 2, 1]),
        torch.arange(5),
        torch.tensor([3, 0, 2, 4, 1]),
    ]
    scaled, result = (formula(x, *indices, *tensors) for x in (5 * score, score))
    assert torch.allclose(scaled, 5 * result, rtol=1e-13) == (name not in OTHERS)
