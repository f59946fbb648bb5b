"""Plans of random problems, by expected times: of the measured rates, and of others."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from random_problems import H100, OTHERS, call_of, random_problem

from flashtile.api.explain import described_call
from flashtile.backend.gpu import rates as rates_of_devices
from flashtile.backend.gpu import waves
from flashtile.backend.gpu.cost import NEARLY
from flashtile.backend.gpu.decoding import is_decoding
from flashtile.backend.gpu.rates import Rates
from flashtile.call.call import Needs
from flashtile.call.device import Device, meta_tensors_on
from flashtile.call.plan import Candidate, Plan
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import UNLIMITED
from flashtile.dispatch import planner
from flashtile.dispatch.launches import launches_of
from flashtile.dispatch.planner import SUPPORT

QKV = Needs(True, True, True)
BACKENDS = ("hopper", "triton")
SEEDS = range(150)
FALL = 0.04  # of the expected time, where a call has more to do
TILES = 384  # rows or keys, whole tiles of all kernels of 16 bits
FIRST_PLAN = 3e-3  # seconds
# Microseconds of what a pass does besides its tiles. Kernels have estimated ones.
ROUND = {
    "byte": 4e-7, "sum byte": 3e-7, "merge byte": 3e-7, "triton merge byte": 3e-7, "products byte": 4e-7,
    "products operation": 4e-9, "products block": 6.0, "merge last": 4.0, "launch last": 12.0, "launch sums": 6.0,
    "launch split": 8.0, "triton launch split": 8.0, "hopper forward softcap": 0.4, "triton forward softcap": 0.4,
    **dict.fromkeys(("launch", "launch backward", "merge", "triton merge", "triton launch backward"), 5.0),
}  # fmt: skip


@pytest.fixture(params=["measured", "round"])
def rates(request: pytest.FixtureRequest) -> Iterator[None]:
    """The rates of the package, or round ones."""
    if request.param == "measured":
        yield
        return
    with mock.patch.object(rates_of_devices, "rates_of", return_value=Rates(ROUND, "round numbers")):
        yield


@pytest.fixture(autouse=True)
def both_backends() -> Iterator[None]:
    planner.forget_plans()
    with (
        mock.patch.object(SUPPORT["hopper"], "unusable", return_value=None),
        mock.patch.object(SUPPORT["hopper"], "unknown_kernels", return_value=None),
        mock.patch.object(SUPPORT["triton"], "unusable", return_value=None),
    ):
        yield
    planner.forget_plans()


def forget_tiles() -> None:
    waves.row_tiles.cache_clear()
    waves.key_tiles.cache_clear()


@pytest.mark.parametrize("needs", [None, QKV])
def test_equal_calls_have_equal_plans(needs: Needs | None) -> None:
    """Whatever was planned before them, and whatever their lengths are within a bucket."""
    with mock.patch.object(planner, "describe_device", return_value=H100):
        plans = [plan(random_problem(seed), needs) for seed in SEEDS]
        planner.forget_plans()
        forget_tiles()
        assert [plan(random_problem(seed), needs) for seed in reversed(SEEDS)] == plans[::-1]
        for seed in SEEDS:
            p = random_problem(seed)
            shorter = replace(p, seqlen_q=max(1, p.seqlen_q - 1), seqlen_k=max(1, p.seqlen_k - 1))
            if shorter.bucketed() == p.bucketed():
                assert plan(shorter, needs) is plan(p, needs)


def plan(problem: Problem, needs: Needs | None) -> Plan | None:
    paged = needs is not None and problem.layout == "paged"
    return None if paged else planner.plan(problem, torch.device("meta"), needs=needs)


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize("needs", [None, QKV])
def test_the_plan_is_the_fastest_candidate(needs: Needs | None) -> None:
    """Of all backends, or nearly with fewer splits. Candidates are in the order of their times, and different."""
    for seed in SEEDS:
        p = random_problem(seed).bucketed()
        found = planner.candidates(p, H100, needs)
        assert len({(name, x.tile, x.num_splits) for name, x in found}) == len(found)
        times = [x.microseconds for _, x in found]
        assert times == sorted(times)
        assert times[0] >= 0
        chosen = planner._plan.__wrapped__(p, H100, "auto", needs, None)
        assert times[0] <= chosen.microseconds <= NEARLY * times[0]
        assert all(f"{chosen.microseconds:.3g}" in reason for _, reason in chosen.why if " us, " in reason)


def grown(p: Problem) -> dict[str, Problem]:
    """Problems with more to do: lengths grow by whole tiles."""
    found = {
        "a sequence more": replace(p, batch=p.batch + 1),
        "twice the batch": replace(p, batch=2 * p.batch),
        "twice the heads": replace(p, num_heads_q=2 * p.num_heads_q, num_heads_kv=2 * p.num_heads_kv),
        "longer": replace(p, seqlen_q=p.seqlen_q + TILES, seqlen_k=p.seqlen_k + TILES),
    }
    if p.window.unlimited:
        found["more keys"] = replace(p, seqlen_k=p.seqlen_k + TILES)
    if p.window.unlimited and not is_decoding(p):  # which has tiles of its own
        found["more rows"] = replace(p, seqlen_q=p.seqlen_q + TILES)
    return found


def fallen(seed: int, needs: Needs | None) -> list[tuple[int, str, float, float]]:
    """Growths of a problem by which the expected time falls, before and after; calls of few rows are a kind of their
    own, with kernels of their own.
    """
    p = random_problem(seed)
    before = planner.candidates(p, H100, needs)[0][1].microseconds
    after = {
        how: planner.candidates(more, H100, needs)[0][1].microseconds
        for how, more in grown(p).items()
        if is_decoding(more) == is_decoding(p)
    }
    return [(seed, how, before, time) for how, time in after.items() if time < (1 - FALL) * before]


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize("needs", [None, QKV])
def test_more_work_takes_more_time(needs: Needs | None) -> None:
    assert [x for seed in SEEDS for x in fallen(seed, needs)] == []


@pytest.mark.parametrize("device", [H100, *OTHERS], ids=lambda device: device.arch)
@pytest.mark.parametrize("needs", [None, QKV])
def test_every_candidate_launches(device: Device, needs: Needs | None) -> None:
    """Of its own problem, and none fails on the host."""
    launched = 0
    for seed in range(60):
        call = call_of(random_problem(seed, longest=2**11))
        p = Problem.describe(call).bucketed()
        for name in BACKENDS:
            for way in ways(name, p, device, needs):
                launched += bool(launches(name, call, p, device, needs, way))
    assert launched > 60


def ways(name: str, problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
    declined = planner.declines_on_device(name, problem, device, needs)
    return [] if declined is not None else SUPPORT[name].candidates(problem, device, needs)


def launches(name: str, call: Any, problem: Problem, device: Device, needs: Needs | None, way: Candidate) -> list[Any]:
    plan = Plan(name, way.tile, way.num_splits, ())
    if needs is None:
        return launches_of(call, device, plan)
    forward = SUPPORT[name].candidates(problem, device, None)[0]
    return launches_of(call, device, Plan(name, forward.tile, forward.num_splits, ()), (plan, needs))


def test_a_first_plan_takes_little_time() -> None:
    """With cold caches: the median of fresh problems, and of the slowest of them the best of three."""
    rates_of_devices.rates_of(H100)
    for needs in (None, QKV):
        for seed in SEEDS[:60]:
            p, best = random_problem(seed).bucketed(), 1.0
            for _ in range(3):
                forget_tiles()
                start = time.perf_counter()
                planner._plan.__wrapped__(p, H100, "auto", needs, None)
                best = min(best, time.perf_counter() - start)
            assert best < FIRST_PLAN


@pytest.mark.parametrize(("seqlen", "backend"), [(4096, "hopper"), (16384, "triton")])
def test_long_masks_take_kernels_that_visit_what_they_show(seqlen: int, backend: str) -> None:
    """Above 128 features, Hopper's backward pass has no lists of a mask's blocks, and Triton's has."""
    document = torch.zeros(1, seqlen, dtype=torch.int32, device="meta")

    def same(b: Any, h: Any, i: Any, j: Any) -> Any:
        return document[b, i] == document[b, j]

    with meta_tensors_on(H100):
        q = torch.empty(1, 16, seqlen, 256, dtype=torch.bfloat16, device="meta")
        p = Problem.describe(described_call(q, q, q, None, None, {"mask": same})).bucketed()
        found, _ = planner.fastest(
            BACKENDS, lambda name, needs: planner.declines_on_device(name, p, H100, needs), p, H100, QKV
        )
    assert found is not None
    assert found.backend == backend


@pytest.mark.parametrize("packed", [False, True])
def test_plans_have_splits_where_launches_have(packed: bool) -> None:
    """Hopper's launches do not split the keys of packed queries, in pages neither."""
    dense = replace(random_problem(0), dtype=torch.bfloat16, window=UNLIMITED, batch=1, num_heads_q=2, num_heads_kv=2)
    dense = replace(dense, seqlen_q=256, seqlen_k=8192, head_dim=128, head_dim_v=128, deterministic=False)
    pages = replace(dense, layout="paged", pages=Pages(64, True, True), packed=packed)
    ways = planner.candidates_of("hopper", pages.bucketed(), H100, None)
    assert (max(way.num_splits for way in ways) > 1) != packed
