"""Formulas that read their term of distances from a table: for which functions, and that the table has all values."""

import pytest
import torch
from torch import Tensor

from flashtile import ScoreMod, score_mods
from flashtile.expression.formula import Formula, formula_of
from flashtile.expression.tabulated import tabulated

H, S = 3, 300
BUCKETS = torch.randn(32, H, generator=torch.Generator().manual_seed(0))


def unlike_heads(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    """A product, and a distance with an offset; the term depends on the head by its index alone."""
    distance = (k_idx - q_idx + 5).clamp(-90, 90)
    return score * (1 + torch.exp(-(distance.abs().sqrt() / (h + 1))) + torch.log(distance.abs() + 2) * table[h])


def by_sequence(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    distance = (q_idx - k_idx).abs().clamp(max=60) + 7 * b
    return score + torch.log(torch.sqrt(torch.log(torch.sqrt(distance + 2) * 3) + 1) * 7) * table[0, h]


def two_terms(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    near = torch.exp(-(q_idx - k_idx).abs().clamp(max=60).sqrt().exp())
    return score * near + torch.log((q_idx - k_idx).abs().clamp(max=60) + 1.0) * table[0, h]


def hides(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    """A condition of distances that is no real number."""
    distance = (q_idx - k_idx).abs().clamp(max=60)
    shown = (torch.exp(torch.sqrt(torch.log(distance + 2) * 3)) * 7).int() % 3 > 0
    return torch.where(shown, score, -torch.inf)


def far_too(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, table: Tensor) -> Tensor:
    """No two distances have one value."""
    distance = (q_idx - k_idx).abs()
    return (
        score
        + torch.log(torch.sqrt(torch.log(torch.sqrt(distance + 2) * 3) + 1) * 7 + 1.0 / (distance + 1)) * table[0, h]
    )


def formula_and_tensors(score_mod: ScoreMod) -> tuple[Formula, list[Tensor]]:
    found = formula_of(score_mod.fn, score_mod.tensors)
    assert isinstance(found, tuple)
    return found


TABULATED = {
    "t5": (score_mods.t5_buckets(BUCKETS), 128),
    "t5 of the past": (score_mods.t5_buckets(BUCKETS, bidirectional=False), 128),
    "near buckets": (score_mods.t5_buckets(BUCKETS[:16], 20), 16),
    "a factor": (ScoreMod(unlike_heads, (BUCKETS[0],)), 128),
}


@pytest.mark.parametrize("name", TABULATED)
def test_the_table_has_all_values(name: str) -> None:
    """On all pairs of a call whose first positions are not 0, the same numbers to the bit."""
    score_mod, reach = TABULATED[name]
    formula, tensors = formula_and_tensors(score_mod)
    found = tabulated(formula)
    assert found is not None
    assert found.reach == reach
    b, h = torch.zeros((), dtype=torch.int64), torch.arange(H)[:, None, None]
    distance = torch.arange(-reach, reach + 1)
    zero = torch.zeros(())
    table = found.term.run((zero, b, h[..., 0], distance.clamp(min=0), (-distance).clamp(min=0)), tensors)
    assert table.shape == (H, 2 * reach + 1)
    score = torch.randn(H, S, S, generator=torch.Generator().manual_seed(1))
    pairs = torch.arange(40, 40 + S)[:, None], torch.arange(S)
    expected = formula.run((score, b, h, *pairs), tensors)
    assert torch.equal(found.formula.run((score, b, h, *pairs), [*tensors, table]), expected)


@pytest.mark.parametrize(
    "score_mod",
    [
        score_mods.alibi(BUCKETS[0]),
        score_mods.decay(BUCKETS[0].sigmoid()),
        score_mods.relative_table(torch.randn(H, 9)),
        ScoreMod(by_sequence, (BUCKETS,)),
        ScoreMod(two_terms, (BUCKETS,)),
        ScoreMod(hides, (BUCKETS,)),
        ScoreMod(far_too, (BUCKETS,)),
        ScoreMod(lambda score, b, h, q_idx, k_idx: score * 2),
    ],
    ids=["alibi", "decay", "a table", "of sequences", "two terms", "hides", "far too", "no distance"],
)
def test_others_have_no_table(score_mod: ScoreMod) -> None:
    assert tabulated(formula_and_tensors(score_mod)[0]) is None


def test_the_new_formula_is_a_value() -> None:
    """It has a key, as a call needs, which makes it again."""
    formula, _ = formula_and_tensors(TABULATED["t5"][0])
    found = tabulated(formula)
    assert found is not None
    assert Formula.of_key(found.formula.key) == found.formula
    assert tabulated(found.formula) is None
