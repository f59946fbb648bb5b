"""The Hopper kernel of float8_e4m3fn on a GPU."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from eight_bit_cases import CASES, FORMULAS, FP8, MASKS, PAGED, call_of, is_close, mask_case, on, paged_case, run, tail

from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import listed
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(support.unusable() is not None, reason="no Hopper GPU"),
    pytest.mark.usefixtures("watchdog"),
]
LONG = 2**17
PRODUCTS = 2.0**-13  # last bit of a sum of products of 8 bits, relative to the largest of its terms


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    given = CASES[name]
    out, lse = run(on("cuda", given), "hopper")
    assert is_close(given, out, lse, of_products=PRODUCTS * given["q"].shape[-1] / 32)


@pytest.mark.parametrize("name", PAGED)
def test_pages(name: str) -> None:
    assert wrong(paged_case(name, "cuda")) == []


@pytest.mark.parametrize("name", ["8 keys a page", "dense cache"])
def test_split_keys(name: str) -> None:
    case = paged_case(name, "cuda")
    assert wrong(replace(case, arguments=case.arguments | {"num_splits": 3})) == []


@pytest.mark.parametrize("name", [*MASKS, *FORMULAS])
def test_masks(name: str) -> None:
    with mock.patch.multiple(listed, LEAST_PAIRS=0, LEAST_MASK_PAIRS=0):
        assert wrong(mask_case(name, "cuda")) == []


def wrong(case: Case) -> list[str]:
    """Results outside of their error bounds."""
    with poisoned_allocation():
        results = {key: x.cpu() for key, x in case.run("hopper").items()}
    expected = solve(case)
    return [str(x) for x in compare(results, case, expected, rounds_to_eight_bits=True) if not x.ok]


@pytest.mark.parametrize("width", [64, 128, 256])
def test_equal_values_over_128k_keys(width: int) -> None:
    given = on("cuda", call_of(width, 128, LONG, scales=0))
    given["v"] = torch.full_like(given["v"].float(), 1.25).to(FP8)
    out, _ = run(given, "hopper")
    assert (out / 1.25 - 1).abs().max() < 1e-3


@pytest.mark.parametrize("place", [0, 70000, LONG - 1])
def test_128k_small_weights_are_half_of_the_mass(place: int) -> None:
    given, expected = tail(LONG, place, 17)
    out, lse = run(on("cuda", given), "hopper")
    assert (out / expected - 1).abs().max() < 1e-3
    assert (lse - math.log(LONG - 1 + 2.0**17)).abs().max() < 1e-4


def test_outliers() -> None:
    """0.1% of N(0, 100) beside N(0, 1)."""
    given = call_of(128, 256, 4096, scales=0)
    make = torch.Generator().manual_seed(1)
    for name in "qkv":
        x = given[name].float()
        more = 10 * torch.randn(x.shape, generator=make)
        given[name] = torch.where(torch.rand(x.shape, generator=make) < 1e-3, x + more, x).to(FP8)
    out, lse = run(on("cuda", given), "hopper")
    assert is_close(given, out, lse, of_products=PRODUCTS * 4)


def test_results_repeat_bitwise() -> None:
    given = on("cuda", call_of(128, 1000, 1500, (8, 2), 3, causal=True))
    first, *others = (run(given, "hopper") for _ in range(4))
    assert all(torch.equal(x, y) for again in others for x, y in zip(again, first, strict=True))


def test_a_graph_of_calls() -> None:
    given = on("cuda", call_of(64, 200, 300, causal=True))
    expected, _ = run(given, "hopper")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = run(given, "hopper")
    graph.replay()
    assert torch.equal(out, expected)
