"""Random problems: which arguments they draw."""

import pytest
import torch
from torch import Tensor

from flashtile.testing.draw import RECORDED, Draw
from flashtile.testing.generate import DTYPES, random_case
from flashtile.verification.examine import Number, Problems, case_of, examine_one


def wide(seed: int, names: tuple[str, ...] = ("cu_seqlens_q", "page_table", "mask")) -> set[str]:
    draw = Draw((seed, 0), torch.device("cpu"), DTYPES)
    arguments = {name: torch.ones(2, dtype=torch.bool if name == "mask" else torch.int32) for name in names}
    return {name for name, x in draw.wide_indices(arguments).items() if x.dtype is torch.int64}


def test_some_indices_are_wide() -> None:
    """Next to narrow ones; by the seed and the name, so that variations need the same kernels."""
    found = [wide(seed) for seed in range(200)]
    for names in (set[str](), {"page_table"}, {"cu_seqlens_q"}, {"page_table", "cu_seqlens_q"}):
        assert found.count(names) > 8
    assert [wide(seed, ("page_table",)) for seed in range(30)] == [names & {"page_table"} for names in found[:30]]
    assert not any(wide(seed) for seed in RECORDED[:100])  # whose results are kept


@pytest.mark.parametrize("function", ["attention_varlen", "attention_with_kvcache"])
def test_problems_have_indices_of_both_dtypes(function: str) -> None:
    found = [x.dtype for n in range(12) for x in random_case(n, function=function).arguments.values() if is_index(x)]
    assert {*found} == {torch.int32, torch.int64}


def is_index(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_floating_point() and x.dtype is not torch.bool


@pytest.mark.parametrize(("seed", "special"), [(32, "k_descale"), (416, "v_dim")])
def test_forward_mode_of_special_values(seed: int, special: str) -> None:
    """Keys of 8 bits have none, and values that are columns of keys move with them."""
    problems = Problems(range(0), ("tiled",), torch.device("cpu"), None)
    assert special in case_of(problems, Number(seed)).arguments
    (outcome,) = examine_one(problems, Number(seed))
    assert not outcome.failed, outcome
