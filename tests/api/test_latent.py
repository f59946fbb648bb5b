"""Values that are columns of the keys: `v_dim`, a view of k, and queries of their own for the values (`qv`)."""

from typing import Any

import pytest
import torch
from checking import assert_right, offsets, tile_size
from torch import Tensor

import flashtile
from flashtile import ArgumentError
from flashtile.call.problem import Problem
from flashtile.dispatch import fast_path, planner
from flashtile.testing.case import Case
from flashtile.testing.eight_bit import FORMATS, with_eight_bits
from flashtile.testing.generate import random_case
from flashtile.testing.latent import latent

D, DV, ROPE = 24, 16, 8
FUNCTIONS = ("attention_varlen", "attention_with_kvcache")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def packed(dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    """A call of `attention_varlen` without values."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, heads, D, generator=generator, dtype=dtype) for n, heads in ((9, 4), (21, 2)))
    return {"q": q, "k": k, "cu_seqlens_q": offsets(4, 5), "cu_seqlens_k": offsets(15, 6), "causal": True} | more


def cached(new: int = 1, **more: Any) -> dict[str, Any]:
    """A call of `attention_with_kvcache` without values, with one key head."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, n, D, generator=generator) for heads, n in ((4, 1), (1, 30)))
    given: dict[str, Any] = {"q": q, "k_cache": k, "cache_seqlens": int32(3, 20), "causal": True}
    if new:
        given["k"] = torch.randn(2, 1, new, D, generator=generator)
    return given | more


# What it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_random_problems(seed: int) -> None:
    """Dense caches, pages and packed sequences against the oracle, with all features."""
    with tile_size(16, 48):
        assert_right(latent(random_case(seed, function=FUNCTIONS[seed % 2])), "tiled", "auto")


@pytest.mark.parametrize(("dtype", "kind"), [*zip(FORMATS, ("tokens", "heads", "tokens"), strict=True)])
def test_caches_of_8_bits(dtype: torch.dtype, kind: str) -> None:
    """Values have the scales of keys, which an append writes once."""
    case = Case("attention_with_kvcache", cached() | {"v_cache": torch.zeros(2, 1, 30, DV)})
    assert_right(latent(with_eight_bits(case, dtype, kind, kind)), "tiled", "auto")


@pytest.mark.parametrize("v_dim", [1, DV, D])
def test_widths(v_dim: int) -> None:
    call = packed()
    out = flashtile.attention_varlen(**call, v=None, v_dim=v_dim)
    assert torch.equal(out, flashtile.attention_varlen(**call, v=call["k"][..., :v_dim].clone()))


def test_the_width_of_deepseek_on_the_cpu_backend() -> None:
    q, k = torch.randn(1, 16, 1, 576), torch.randn(1, 1, 50, 576)
    call: dict[str, Any] = {"cache_seqlens": 50, "scale": 192**-0.5}
    out = flashtile.attention_with_kvcache(q, k, None, v_dim=512, backend="cpu", **call)
    expected = flashtile.attention_with_kvcache(q.double(), k.double(), k[..., :512].double(), **call)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_values_are_added_to_those_of_keys() -> None:
    call = packed(torch.float64)
    found = []
    for has_values in (False, True):
        q, k = (call[name].clone().requires_grad_() for name in ("q", "k"))
        v = k[..., :DV] * 1.0 if has_values else None
        out = flashtile.attention_varlen(**call | {"q": q, "k": k}, v=v, v_dim=None if has_values else DV)
        found.append((out, *torch.autograd.grad(out.sin().sum(), (q, k))))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y)


def test_keys_alone_are_appended() -> None:
    """At their turned positions, if they are turned, and in the same places as with values of their own."""
    angles = torch.rand(30, 4)
    for rotary in ({}, {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}):
        call = cached(**rotary)
        separate = call | {"k_cache": call["k_cache"].clone()}
        out = flashtile.attention_with_kvcache(**call, v_cache=None, v_dim=DV)
        v = separate["k"][..., :DV]
        flashtile.attention_with_kvcache(**separate, v_cache=torch.zeros(2, 1, 30, DV), v=v)
        assert torch.equal(call["k_cache"], separate["k_cache"])
        again = call | {"k": None, "cache_seqlens": call["cache_seqlens"] + 1}
        assert torch.equal(out, flashtile.attention_with_kvcache(**again, v_cache=call["k_cache"][..., :DV].clone()))


@pytest.mark.parametrize("paged", [False, True])
def test_compiled(paged: bool) -> None:
    call = cached(v_dim=DV, v_cache=None)
    if paged:
        pages = call["k_cache"].view(6, 10, 1, D)
        call |= {"k_cache": pages, "page_table": torch.arange(6, dtype=torch.int32).view(2, 3)}
    eager = call | {"k_cache": call["k_cache"].clone()}
    function = torch.compile(flashtile.attention_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(**call), flashtile.attention_with_kvcache(**eager))
    assert torch.equal(call["k_cache"], eager["k_cache"])
    compiled = torch.compile(flashtile.attention_varlen, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**packed(), v=None, v_dim=DV), flashtile.attention_varlen(**packed(), v=None, v_dim=DV))


def test_exported() -> None:
    call = cached(v_dim=DV)
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor)}

    class Step(torch.nn.Module):
        def forward(self, **tensors: Tensor) -> Tensor:
            return flashtile.attention_with_kvcache(**tensors, v_cache=None, v_dim=DV, causal=True)

    exported = torch.export.export(Step(), (), tensors).module()
    given, eager = ({name: x.clone() for name, x in tensors.items()} for _ in range(2))
    assert torch.equal(exported(**given), Step()(**eager))
    assert torch.equal(given["k_cache"], eager["k_cache"])


# Views of keys --------------------------------------------------------------------------------------------------------


def described(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the values of each call that is planned from now on are columns of its keys."""
    found: list[bool] = []
    describe = Problem.describe

    def recorded(call: Any) -> Problem:
        problem = describe(call)
        found.append(problem.latent)
        return problem

    monkeypatch.setattr(planner.Problem, "describe", recorded)
    return found


def test_a_narrower_view_of_the_keys_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    fast_path.forget()
    found, call = described(monkeypatch), packed()
    k = call["k"]
    separate = torch.empty_strided(k[..., :DV].shape, k.stride())
    for v in (k[..., :DV], k[..., :DV].clone(), k, k[..., 1 : DV + 1], separate.copy_(k[..., :DV])):
        flashtile.attention_varlen(**call, v=v)
    assert found == [True, False, False, False, False]
    scales = {"k_descale": torch.ones(1), "v_descale": torch.full((1,), 2.0)}
    pages = torch.zeros(2, 16, 1, D, dtype=torch.int8)
    q, table = torch.zeros(1, 2, 1, D), torch.zeros(1, 1, dtype=torch.int32)
    flashtile.attention_with_kvcache(q, pages, pages[..., :DV], cache_seqlens=3, page_table=table, **scales)
    assert found[-1] is False  # values have other scales


def test_repeated_calls_see_whether_values_are_a_view() -> None:
    """The guards of tensors tell layouts, not addresses: a call is repeated, its values are elsewhere, and back."""
    fast_path.forget()
    call = packed()
    k = call["k"]
    elsewhere = torch.empty_strided(k[..., :DV].shape, k.stride()).normal_()
    for _ in range(4):
        flashtile.attention_varlen(**call, v=k[..., :DV])
    other = flashtile.attention_varlen(**call, v=elsewhere)
    assert torch.equal(other, flashtile.attention_varlen(**call, v=elsewhere.contiguous()))
    for _ in range(4):
        flashtile.attention_varlen(**call, v=elsewhere)
    assert torch.equal(
        flashtile.attention_varlen(**call, v=k[..., :DV]), flashtile.attention_varlen(**call, v=None, v_dim=DV)
    )


def test_repeated_calls_with_v_dim() -> None:
    """Each call appends, attends, and writes into `out`, as the first one did."""
    fast_path.forget()
    calls = [cached(v_dim=DV, v_cache=None) for _ in range(5)]
    out = torch.empty(2, 4, 1, DV)
    expected = flashtile.attention_with_kvcache(**calls[0], backend="tiled")
    for call in calls[1:]:
        flashtile.attention_with_kvcache(**call, backend="tiled", out=out.zero_())
        assert torch.equal(out, expected)
        assert torch.equal(call["k_cache"], calls[0]["k_cache"])


# Queries of their own for the values ----------------------------------------------------------------------------------


def split(call: dict[str, Any], copies: bool) -> dict[str, Any]:
    """A call with one row of keys as one with keys, values and `qv`."""
    q, cached = call["q"], "k_cache" in call
    names = ("k_cache", "v_cache") if cached else ("k", "v")
    parts = {names[0]: call[names[0]][..., DV:], names[1]: call[names[0]][..., :DV]}
    if cached and call.get("k") is not None:
        parts |= {"k": call["k"][..., DV:], "v": call["k"][..., :DV]}
    if copies:
        parts = {name: x.clone() for name, x in parts.items()}
    return call | parts | {"q": q[..., DV:], "qv": q[..., :DV]}


@pytest.mark.parametrize("copies", [False, True])
def test_queries_of_values(copies: bool) -> None:
    call = packed()
    expected = flashtile.attention_varlen(**call, v=None, v_dim=DV)
    assert torch.equal(flashtile.attention_varlen(**split(call, copies)), expected)
    call = cached(new=0)
    expected = flashtile.attention_with_kvcache(**call, v_cache=None, v_dim=DV)
    for _ in range(3):
        assert torch.equal(flashtile.attention_with_kvcache(**split(call, copies)), expected)


def test_queries_of_values_and_new_tokens() -> None:
    call, other = cached(), cached()
    expected = flashtile.attention_with_kvcache(**call, v_cache=None, v_dim=DV)
    assert torch.equal(flashtile.attention_with_kvcache(**split(other, copies=False)), expected)
    assert torch.equal(call["k_cache"], other["k_cache"])


def test_gradients_of_queries_of_values() -> None:
    call = split(packed(torch.float64), copies=True)
    leaves = {name: call[name].requires_grad_() for name in ("q", "k", "v", "qv")}

    def out_of(*leaves: Tensor) -> Tensor:
        q, k, v, qv = leaves
        return flashtile.attention_varlen(**call | {"q": q, "k": k, "v": v, "qv": qv})

    assert torch.autograd.gradcheck(out_of, tuple(leaves.values()), fast_mode=True)


# What is refused, and what is said ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"v": torch.zeros(21, 2, DV), "v_dim": DV}, "v"),
        ({"v": None}, "v"),
        ({"v": None, "v_dim": D + 1}, "v_dim"),
        ({"v": None, "v_dim": 0}, "v_dim"),
        ({"v": None, "v_dim": 2.0}, "v_dim"),
        ({"v": None, "v_dim": DV, "v_descale": torch.ones(2)}, "v_descale"),
        ({"v": None, "qv": torch.zeros(9, 4, DV)}, "v"),
        ({"v": torch.zeros(21, 2, DV), "qv": torch.zeros(9, 4, DV + 1)}, "qv"),
        ({"v": torch.zeros(20, 2, DV), "qv": torch.zeros(9, 4, DV)}, "v"),
    ],
)  # fmt: skip
def test_errors(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as error:
        flashtile.attention_varlen(**packed() | given)
    assert error.value.argument == named


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"v_dim": DV, "v": torch.zeros(2, 1, 1, DV)}, "v"),
        ({"v_dim": None}, "v_cache"),
        ({"v_cache": torch.zeros(2, 1, 30, DV), "v_dim": None}, "v"),
        ({"k": torch.zeros(2, 1, 1, DV), "v_dim": DV}, "k"),
    ],
)  # fmt: skip
def test_errors_of_caches(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as error:
        flashtile.attention_with_kvcache(**cached() | {"v_cache": None} | given)
    assert error.value.argument == named


def test_errors_of_queries_of_values() -> None:
    call = split(cached(), copies=True)
    with pytest.raises(ArgumentError, match="views of one tensor") as error:
        flashtile.attention_with_kvcache(**call)
    assert error.value.argument == "v_cache"
    tables = {"rotary_cos": torch.ones(30, 4), "rotary_sin": torch.ones(30, 4)}
    with pytest.raises(ArgumentError, match="turn q") as error:
        flashtile.attention_with_kvcache(**split(cached(), copies=False) | tables)
    assert error.value.argument == "rotary_cos"


def test_explained() -> None:
    call = packed()
    given = call.pop("q"), call.pop("k")
    apart = flashtile.explain(*given, given[1][..., :DV].clone(), **call)
    shared = flashtile.explain(*given, None, **call, v_dim=DV)
    assert "v in k" in str(shared)
    assert "v in k" not in str(apart)
    assert apart.bytes_forward - shared.bytes_forward == given[1][..., :DV].numel() * 4
