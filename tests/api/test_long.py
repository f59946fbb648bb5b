"""Long problems: what they are, that their oracle is exact, and that a single accumulator does not pass."""

import math
import re

import numpy as np
import pytest
import torch

from flashtile.testing.case import Case
from flashtile.testing.long import LONGEST, SHORTEST, VALUES, long_case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare
from flashtile.verification.examine import Number, Problems, examine_one

THIRD = 1 / 3
LONGEST_SEED = 35


def sizes_of(case: Case) -> tuple[int, int]:
    return case.arguments["q"].shape[2], case.arguments["k"].shape[2]


def test_problems_cover_lengths_values_and_both_sides() -> None:
    cases = [long_case(seed, longest=2 * SHORTEST) for seed in range(40)]
    assert {max(sizes_of(case)) > SHORTEST for case in cases} == {True, False}
    assert {seqlen_q > seqlen_k for seqlen_q, seqlen_k in map(sizes_of, cases)} == {True, False}
    assert {re.match(r"long, (.*?):", case.description)[1] for case in cases} == set(VALUES)  # type: ignore[index]
    again = long_case(4, longest=2 * SHORTEST).arguments
    assert all(torch.equal(again[name], cases[4].arguments[name]) for name in "qkv")
    assert LONGEST - 100 <= max(sizes_of(long_case(LONGEST_SEED))) <= LONGEST


def uniform(keys: int, dtype: torch.dtype, seqlen_q: int = 1) -> Case:
    """Weights that are all the same, over values of 1/3."""
    shape = (1, 1, keys, 2)
    k, v = torch.zeros(shape, dtype=dtype), torch.full(shape, THIRD, dtype=dtype)
    q, dout = torch.zeros(1, 1, seqlen_q, 2, dtype=dtype), torch.full((1, 1, seqlen_q, 2), THIRD, dtype=dtype)
    return Case("attention", {"q": q, "k": k, "v": v}, dout)


def test_the_oracle_of_uniform_weights() -> None:
    keys, rows = 2**18, 2**18
    expected = solve(uniform(keys, torch.float64))
    assert abs(expected["out"].reference / THIRD - 1).max() < 1e-15
    assert abs(expected["lse"].reference - math.log(keys)).max() < 1e-14
    expected = solve(uniform(1, torch.float64, seqlen_q=rows))
    assert abs(expected["dv"].reference / (rows * THIRD) - 1).max() < 1e-15


def test_a_single_accumulator_is_noticed() -> None:
    """One that adds key after key in float32, as a kernel would without blocks."""
    case = uniform(2**16, torch.float32)
    case.forward_only = True
    expected = solve(case)
    right = {name: x.reference.to(x.dtype) for name, x in expected.items()}
    assert all(x.ok for x in compare(right, case, expected))
    total = np.cumsum(np.full(2**16, THIRD, np.float32), dtype=np.float32)[-1]
    wrong = right | {"out": torch.full_like(right["out"], float(total) / 2**16)}
    assert [x.name for x in compare(wrong, case, expected) if not x.ok] == ["out"]


@pytest.mark.parametrize("seed", [0, 2, 3, 9, 11, 21])
def test_backends_are_within_the_bound(seed: int) -> None:
    """Each failed on the CPU, in `reference`, or in both, while sums went through one accumulator."""
    problems = Problems(range(0), ("cpu", "tiled", "reference"), torch.device("cpu"), (torch.float32, torch.float64))
    outcomes = examine_one(problems, Number(seed, long=True))
    wrong = [(x.backend, x.error or [str(d) for d in x.deviations if not d.ok]) for x in outcomes if x.failed]
    assert not wrong, outcomes[0].description
