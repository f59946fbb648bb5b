"""Random problems: which arguments they draw."""

import pytest
import torch
from torch import Tensor

from flashtile.testing.draw import RECORDED, Draw
from flashtile.testing.generate import DTYPES, random_case


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
