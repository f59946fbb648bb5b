"""What the benchmark checks before it measures: right results pass, wrong ones are found, peers are called right."""

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from spoilt import CPU, LARGE, SMALL, Spoilt
from torch import Tensor

from flashtile.bench.cell import Cell
from flashtile.bench.check import Checker, without_dropout
from flashtile.bench.inputs import make_case
from flashtile.bench.parts import parts
from flashtile.bench.providers import Declined, Prepared, Provider, make
from flashtile.testing.case import Case

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "longer keys": {"causal": True, "seqlen_k": 700},
    "window": {"window": (90, 0), "causal": True},
    "window both sides": {"window": (90, 20)},
    "softcap": {"softcap": 3.0},
    "bias and mask": {"bias": True, "mask": True},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True, "causal": True},
    "packed": {"lengths": (500, 2, 400, 61), "causal": True},
    "packed with alibi": {"lengths": (600, 400), "alibi": True},
    "low precision": {"dtype": "bfloat16", "causal": True},
    "wide values": {"head_dim_v": 24},
    "outliers": {"inputs": "outliers"},
}


def verdict_of(provider: Provider, cell: Cell) -> Any:
    case = make_case(cell, CPU)
    return Checker(case).verdict(provider, provider.prepare(case), False)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_right_result_passes_whole_and_in_parts(feature: str) -> None:
    cell = replace(LARGE, measure="backward", **FEATURES[feature])
    found = verdict_of(make(["flashtile"])[0], cell)
    assert found.ok, found
    assert "rows" in found.what  # these are too large to be solved whole
    small = replace(cell, lengths=(20, 3) if cell.lengths else (), seqlen_q=40, seqlen_k=None)
    found = verdict_of(make(["flashtile"])[0], small)
    assert found.ok, found
    assert found.what == "every element"


@pytest.mark.parametrize(
    "cell", [SMALL, LARGE, replace(LARGE, lengths=(500, 500, 3))], ids=["whole", "parts", "packed"]
)
@pytest.mark.parametrize("result", ["out", "dq", "dk", "dv"])
def test_a_wrong_result_is_found(cell: Cell, result: str) -> None:
    def scaled(name: str, x: Tensor) -> Tensor:
        return x * 1.001 if name == result else x

    found = verdict_of(Spoilt(scaled), replace(cell, measure="backward"))
    assert not found.ok
    assert result in found.reason


def test_one_wrong_row_among_those_compared_is_found() -> None:
    def one_row(name: str, x: Tensor) -> Tensor:
        if name == "out":
            x[0, 0, 290] += 1e-3
        return x

    part = parts(make_case(LARGE, CPU))[1]
    assert part.first <= 290 < part.last
    assert not verdict_of(Spoilt(one_row), LARGE).ok


def test_a_gradient_that_is_not_finite_is_found_outside_the_parts() -> None:
    def one_row(name: str, x: Tensor) -> Tensor:
        if name == "dk":
            x[0, 0, 1] = float("nan")
        return x

    cell = replace(LARGE, measure="backward", seqlen_q=900, window=(20, 0), causal=True)
    assert all(part.first > 21 for part in parts(make_case(cell, CPU)))
    found = verdict_of(Spoilt(one_row), cell)
    assert not found.ok
    assert "dk is not finite" in found.reason


def test_what_is_not_written_is_found() -> None:
    class Unwritten(Spoilt):
        def prepare(self, case: Case, decode: bool = False) -> Prepared:
            right = super().prepare(case, decode)
            done = right.forward()

            def forward() -> Tensor:
                out = torch.empty_like(done)
                out[..., :-1] = done[..., :-1]
                return out

            return Prepared(forward)

    assert not verdict_of(Unwritten(lambda name, x: x), replace(LARGE, seqlen_q=2000)).ok


def test_dropout_is_checked_where_the_random_numbers_are_known() -> None:
    cell = replace(SMALL, dropout=0.3)
    assert verdict_of(make(["flashtile"])[0], cell).what == "every element"
    for heads, rows in ((4, 256), (64, 128)):  # of many heads the oracle solves fewer rows
        large = replace(LARGE, heads=heads, dropout=0.3, causal=True, measure="backward")
        found = verdict_of(make(["flashtile"])[0], large)
        assert found.ok, found.reason
        assert found.what == f"every element, of {rows} rows and keys"
    assert verdict_of(make(["plain"])[0], cell).what.endswith("without dropout")
    assert "dropout_p" not in without_dropout(make_case(cell, CPU)).arguments


@pytest.mark.parametrize("name", ["sdpa:flash", "sdpa:math", "plain"])
@pytest.mark.parametrize("feature", ["plain", "causal", "longer keys", "window", "bias and mask", "alibi"])
def test_other_libraries_are_called_as_the_contract_means_it(name: str, feature: str) -> None:
    for size in (SMALL, replace(SMALL, heads=4, heads_kv=2)):
        cell = replace(size, measure="backward", **FEATURES[feature])
        found = verdict_of(make([name])[0], replace(cell, seqlen_k=cell.seqlen_k and 50))
        assert found.ok, found


@pytest.mark.skipif(shutil.which("g++") is None, reason="FlexAttention compiles with g++")
def test_flex_is_called_as_the_contract_means_it() -> None:
    cell = Cell(heads=4, heads_kv=2, seqlen_q=128, head_dim=16, causal=True, softcap=3.0, alibi=True, window=(50, 0))
    found = verdict_of(make(["flex"])[0], cell)
    assert found.ok, found
    with pytest.raises(Declined, match="backward"):
        make(["flex"])[0].prepare(make_case(replace(cell, measure="backward"), CPU))
