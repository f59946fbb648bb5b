"""Tolerance of a call with a KV cache: none for copies, and one rounding where both neighbors are right."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare


def cache_problem() -> Case:
    """One key in the cache, one new key and one query, turned by a cosine half-way between two numbers of fp16."""
    k_cache, v_cache = torch.full((1, 1, 3, 2), torch.nan), torch.full((1, 1, 3, 1), torch.nan)
    k_cache[0, 0, 0], v_cache[0, 0, 0] = 0.0, 1.0
    cos = torch.tensor([[1.0], [1 + 2**-11]])
    tensors = {"q": [8.0, 0.0], "k": [1.0, 0.0], "v": [2.0]}
    arguments = {name: torch.tensor(x)[None, None, None].half() for name, x in tensors.items()}
    arguments |= {"k_cache": k_cache.half(), "v_cache": v_cache.half(), "cache_seqlens": torch.tensor([1]).int()}
    return Case("attention_with_kvcache", arguments | {"rotary_cos": cos, "rotary_sin": torch.zeros_like(cos)})


def cache_results(q: float, k: float) -> dict[str, Tensor]:
    """Results of a call that has rotated 8 to `q` and 1 to `k`."""
    case = cache_problem()
    s = q * k / math.sqrt(2)
    caches = {name: case.arguments[name].clone() for name in ("k_cache", "v_cache")}
    caches["k_cache"][0, 0, 1, 0], caches["k_cache"][0, 0, 1, 1], caches["v_cache"][0, 0, 1] = k, 0.0, 2.0
    out = torch.tensor((1 + 2 * math.exp(s)) / (1 + math.exp(s))).half().reshape(1, 1, 1, 1)
    return {"out": out, "lse": torch.tensor(math.log1p(math.exp(s))).reshape(1, 1, 1)} | caches


@pytest.mark.parametrize("q", [8, 8 + 2**-7])
@pytest.mark.parametrize("k", [1, 1 + 2**-10])
def test_what_rounds_either_way_may_do_so(q: float, k: float) -> None:
    worst = compare(cache_results(q, k), cache_problem())[0]
    assert worst.ok, worst


@pytest.mark.parametrize(("q", "k"), [(8 + 3 * 2**-7, 1), (8 - 3 * 2**-7, 1), (8, 1 - 3 * 2**-10), (8, 1 + 2**-7)])
def test_other_roundings_are_outside_the_bound(q: float, k: float) -> None:
    assert compare(cache_results(q, k), cache_problem())[0].name in ("lse", "k_cache")
    assert not compare(cache_results(q, k), cache_problem())[0].ok


def test_elements_that_round_one_way_have_no_slack() -> None:
    case = cache_problem()
    case.arguments["rotary_cos"] = torch.tensor([[1.0], [1 + 2**-11 + 2**-20]])
    assert not solve(case)["lse"].slack.any()
    assert solve(cache_problem())["lse"].slack.all()


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_copies_are_exact(name: str) -> None:
    case = random_case(3, function="attention_with_kvcache", dtypes=(torch.float32,))
    actual = case.run("tiled")
    assert compare(actual, case)[0].ok
    there = ~actual[name].isnan()
    index = tuple(int(n) for n in (~case.arguments[name].isnan()).nonzero()[0])  # of a key that was in the cache
    assert torch.equal(actual[name][index], case.arguments[name][index])
    for wrong in (actual[name][index] * (1 + 2**-23), torch.nan):
        changed = {**actual, name: actual[name].clone()}
        changed[name][index] = wrong
        worst = compare(changed, case)[0]
        assert (worst.name, worst.index) == (name, index)
        assert not worst.ok
    changed[name] = actual[name].where(there, 0.0)  # written where nothing belongs
    assert not compare(changed, case)[0].ok


def test_a_write_outside_of_a_cache_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(q: Tensor, k_cache: Tensor, v_cache: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        k_cache.as_strided((1,), (1,), k_cache.storage_offset() - 1).fill_(0)
        return q, q

    monkeypatch.setattr(flashtile, "attention_with_kvcache", careless)
    with pytest.raises(RuntimeError, match="outside of k_cache"):
        cache_problem().run()
