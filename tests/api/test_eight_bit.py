"""Keys and values of 8 bits: what calls compute with them, what an append stores, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached import Arguments, angles, problem, same_bits
from checking import assert_right, features, tile_size
from torch import Tensor

import flashtile
from flashtile import ArgumentError, AttentionError
from flashtile.dispatch import fast_path
from flashtile.testing.case import CACHES, Case
from flashtile.testing.eight_bit import FORMATS, with_eight_bits
from flashtile.testing.generate import random_case
from flashtile.testing.oracle.eight_bit import magnitudes, quantized, scales_of_tokens

E4M3, E5M2, INT8 = FORMATS
KINDS = ("none", "heads", "sequences", "pages", "tokens")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def eight_bit(dtype: torch.dtype = E4M3, kind: str = "heads", **arguments: Any) -> Case:
    """`cached.problem` with caches of 8 bits."""
    case = Case("attention_with_kvcache", problem(**arguments))
    return with_eight_bits(case, dtype, kind, kind, torch.Generator().manual_seed(1))


def has_pages(case: Case) -> bool:
    return "k_cache" in case.arguments or "page_table" in case.arguments


def call(arguments: Arguments, **options: Any) -> Tensor:
    return flashtile.attention_with_kvcache(**arguments, **options)


def copies(arguments: Arguments) -> Arguments:
    return {name: x.clone() if isinstance(x, Tensor) else x for name, x in arguments.items()}


# What it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_formats_and_scales(dtype: torch.dtype, kind: str) -> None:
    """Dense caches and pages, and packed calls, against the oracle; scales of slots without a key are NaN."""
    generator = torch.Generator().manual_seed(3)
    with tile_size(16, 48):
        for seed, function in ((12, "attention_varlen"), (KINDS.index(kind), "attention_with_kvcache")):
            case = random_case(seed, function=function)
            assert has_pages(case)
            assert_right(with_eight_bits(case, dtype, kind, KINDS[seed % 5], generator))


@pytest.mark.parametrize("name", features())
def test_every_score_feature(name: str) -> None:
    """They see scores of numbers that are multiplied by their scales, in the contract's order."""
    arguments = features()[name] | {"seed": 3, "held": (5, 2), "new": 7, "heads": (2, 1), "capacity": 12}
    arguments.pop("num_heads_kv", None)
    for pairwise in ("mask", "bias"):
        if isinstance(arguments.get(pairwise), Tensor):
            arguments[pairwise] = torch.nn.functional.pad(arguments[pairwise], (0, 3))
    assert_right(eight_bit(INT8, "tokens", **arguments))


def test_a_scale_that_is_nan_is_a_key_that_is_nan() -> None:
    case = eight_bit(kind="tokens", held=(6, 6), new=None, queries=2, causal=True)
    case.arguments["k_descale"][0, 0, 5] = torch.nan  # the last key, which the last row alone sees
    assert_right(case)
    out = call(case.arguments)
    group = out.shape[1] // case.arguments["k_cache"].shape[1]
    assert out[0, :group, 1].isnan().all()
    assert not out[0, :, 0].isnan().any()
    assert not out[1].isnan().any()


# What an append stores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """All numbers of the format, halfway between two, beyond the largest, zeros of both signs, NaN."""
    grid = magnitudes(dtype)
    numbers = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * 1.5, grid.new_tensor([torch.inf, torch.nan])))
    numbers = torch.cat((numbers, -numbers)).float()
    numbers = numbers.repeat(-(-1024 // len(numbers)))[: 1024 // 16 * 16].view(1, 1, -1, 16)
    for scale in (1.0, 0.25, 3.0):
        k_cache, v_cache = (torch.zeros(1, 1, numbers.shape[2], 16).to(dtype) for _ in range(2))
        descale = torch.tensor([scale])
        call(
            {"q": numbers[:, :, :1].nan_to_num(), "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": 0}
            | {"k": numbers, "v": numbers * scale, "k_descale": descale, "v_descale": descale}
        )
        for cache, given in ((k_cache, numbers), (v_cache, numbers * scale)):
            assert same_bits(cache.float(), quantized(given, descale, dtype).float())
    assert quantized(torch.tensor([grid[-1] * 2]), torch.ones(1), dtype) == grid[-1]


def test_scales_of_tokens() -> None:
    """The largest becomes the largest; zeros have the scale 1, and NaN and infinities no influence on others."""
    k = torch.zeros(1, 1, 5, 4)
    k[0, 0] = torch.tensor(
        [[1.0, -2, 0, 0], [0, 0, 0, 0], [3, torch.nan, 0, 0], [1, torch.inf, 0, 0], [1e-45, 0, 0, 0]]
    )
    for dtype in FORMATS:
        caches = {f"{x}_cache": torch.zeros(1, 1, 8, 4).to(dtype) for x in "kv"}
        descales = {f"{x}_descale": torch.full((1, 1, 8), 7.0) for x in "kv"}
        call({"q": k[:, :, :1], "cache_seqlens": 1, "k": k, "v": k} | caches | descales)
        largest = magnitudes(dtype)[-1].float()
        expected = torch.tensor([2.0, 0, 3, torch.finfo(torch.float32).max, 0]) / largest
        expected = expected.where(expected > 0, 1.0)
        for name, x in descales.items():
            assert torch.equal(x[0, 0, 1:6], expected), name
            assert (x[0, 0, [0, 6, 7]] == 7).all()
            assert torch.equal(scales_of_tokens(k[0].transpose(0, 1), dtype)[:, 0], expected)
        assert float(caches["k_cache"][0, 0, 1, 1].float()) == -largest


def test_rotated_keys_are_quantized() -> None:
    """Scales are those of rotated numbers, each of which is one of the two that are nearest."""
    cos, sin = angles(12, 8)
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    arguments = problem(held=(3, 0, 4), new=2, causal=True, **rotary)
    wide = copies(arguments)
    call(wide)
    for dtype in FORMATS:
        given = eight_bit(dtype, "tokens", held=(3, 0, 4), new=2, causal=True).arguments | rotary
        call(given)
        for b, n in enumerate((3, 0, 4)):
            new, scale = given["k_cache"][b, :, n : n + 2].float(), given["k_descale"][b, :, n : n + 2, None]
            step = 1.01 * scale if dtype is INT8 else (new * scale).abs() * (0.13 if dtype is E4M3 else 0.26) + scale
            assert ((new * scale - wide["k_cache"][b, :, n : n + 2]).abs() <= step).all()


@pytest.mark.parametrize("enabled", [True, False])
def test_repeated_calls(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned, recorded and replayed calls store and return the same, and count their writes."""
    monkeypatch.setattr(fast_path, "enabled", enabled)
    for kind in ("heads", "tokens"):
        case = eight_bit(kind=kind, held=(3, 5), new=1, causal=True)
        first = copies(case.arguments)
        expected = call(first)
        for _ in range(3):
            given = copies(case.arguments)
            versions = {name: given[name]._version for name in CACHES}
            assert torch.equal(call(given), expected)
            for name in CACHES:
                assert same_bits(given[name].float(), first[name].float())
                written = kind == "tokens" or name.endswith("cache")
                assert (given[name]._version > versions[name]) == written, name


# Compilers, autocast --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["heads", "tokens"])
def test_compiled_and_exported(kind: str) -> None:
    torch._dynamo.reset()
    case = eight_bit(kind=kind, held=(3, 5), new=1, causal=True)
    expected = copies(case.arguments)
    out = call(expected)

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, caches: dict[str, Any], lengths: Tensor) -> Tensor:
            return flashtile.attention_with_kvcache(q, cache_seqlens=lengths, k=k, v=v, causal=True, **caches)

    def inputs() -> tuple[Any, ...]:
        given = copies(case.arguments)
        return *(given[x] for x in "qkv"), {x: given[x] for x in CACHES}, given["cache_seqlens"]

    with torch.no_grad():
        programs = torch.compile(Model(), backend="aot_eager"), torch.export.export(Model(), inputs()).module()
        for program in programs:
            given = inputs()
            assert torch.equal(program(*given), out)
            assert all(same_bits(given[3][name].float(), expected[name].float()) for name in CACHES)


def test_autocast_leaves_8_bits_alone() -> None:
    case = eight_bit(kind="heads", held=(3, 5), new=1, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(copies(case.arguments))
    half = copies(case.arguments) | {x: case.arguments[x].bfloat16() for x in "qkv"}
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, call(half))


# Errors ---------------------------------------------------------------------------------------------------------------


def changed(**new: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda x: x | {name: change(x.get(name)) for name, change in new.items()}


MISTAKES: dict[str, tuple[str, Arguments, Callable[[Arguments], Arguments]]] = {
    "scales of another dtype": ("k_descale", {}, changed(k_descale=Tensor.double)),
    "scales of too few heads": ("v_descale", {}, changed(v_descale=lambda x: x[:1])),
    "a scale without dimensions": ("v_descale", {}, changed(v_descale=lambda x: x[0])),
    "scales of another cache": ("k_descale", {}, changed(k_descale=lambda x: x.expand(3, 5, 2))),
    "scales of pages without pages": ("k_descale", {}, changed(k_descale=lambda x: x.expand(5, 2))),
    "scales of wider caches": ("k_descale", {}, changed(k_cache=Tensor.float, v_cache=Tensor.float)),
    "v of another format": ("v_cache", {}, changed(v_cache=lambda x: x.view(torch.int8))),
    "a format without kernels": ("k_cache", {}, changed(k_cache=lambda x: x.view(torch.uint8))),
    "scales that share memory": ("k_descale", {"kind": "tokens"}, changed(k_descale=lambda x: x[:1].expand(x.shape))),
    "as many pages as sequences": (
        "k_descale",
        {"page_size": 4},
        lambda x: x | {"k_cache": x["k_cache"][:3], "v_cache": x["v_cache"][:3], "k_descale": torch.ones(3, 2)},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    argument, sizes, mistake = MISTAKES[name]
    given = eight_bit(**{"held": (3, 0, 4), "new": 1} | sizes).arguments
    call(copies(given))
    wrong = mistake(copies(given))
    with pytest.raises(ArgumentError, match=f"`{argument}`"):
        call(wrong)


def pages() -> Arguments:
    """Two packed sequences whose keys are in four pages of 8."""
    k, v = (torch.randn(4, 8, 2, 16).to(E5M2) for _ in range(2))
    starts, table = int32(0, 3, 5), torch.tensor([[1, 0], [2, 3]]).int()
    given = {"q": torch.randn(5, 4, 16), "k": k, "v": v, "cu_seqlens_q": starts, "cu_seqlens_k": None}
    descales = {"k_descale": torch.tensor([1.0, 0.5]), "v_descale": torch.tensor([0.5, 2.0])}
    return given | {"seqused_k": int32(9, 16), "page_table": table, "causal": True} | descales


def packed(dtype: torch.dtype = E5M2) -> Arguments:
    """Sequences of 4, 0 and 7 keys one after another, of which 6 of the last one are in use."""
    k, v = (torch.randn(12, 2, 16).to(dtype) for _ in range(2))
    given = {"q": torch.randn(6, 4, 16), "k": k, "v": v, "cu_seqlens_q": int32(0, 2, 3, 6), "causal": True}
    return given | {"cu_seqlens_k": int32(0, 4, 4, 11), "seqused_k": int32(4, 0, 6)}


@pytest.mark.parametrize(("dtype", "backend"), [(E4M3, "reference"), (E5M2, "tiled"), (INT8, "cpu")])
def test_packed_keys(dtype: torch.dtype, backend: str) -> None:
    """The results of dequantized keys, for scales of heads, sequences and tokens, also where no key is."""
    given = packed(dtype)
    sequence = torch.tensor([0] * 4 + [2] * 8)  # of each token
    for k_descale in (None, torch.rand(2), torch.rand(3, 2), torch.rand(2, 12)):
        v_descale = torch.rand(2, 12)
        v_descale[:, 10:] = torch.nan  # of keys that are not in use
        of_tokens: Tensor | float = 1.0 if k_descale is None else k_descale
        if k_descale is not None and k_descale.dim() == 2:
            of_tokens = k_descale[sequence] if len(k_descale) == 3 else k_descale.t()
        k = given["k"].float() * (of_tokens if isinstance(of_tokens, float) else of_tokens[..., None])
        wide = given | {"k": k, "v": given["v"].float() * v_descale.t()[..., None]}
        descales = {"k_descale": k_descale, "v_descale": v_descale}
        for more in ({}, {"max_seqlen_k": 7, "max_seqlen_q": 3}):
            found = flashtile.attention_varlen(**given, **descales, **more, backend=backend)
            torch.testing.assert_close(found, flashtile.attention_varlen(**wide))


def test_packed_keys_in_a_compiled_program() -> None:
    given = packed() | {"k_descale": torch.rand(2, 12)}
    compiled = torch.compile(lambda: flashtile.attention_varlen(**given), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(), flashtile.attention_varlen(**given))


def test_mistakes_of_packed_keys() -> None:
    given = packed()
    for changes, match in (
        ({"k_descale": torch.ones(12, 2)}, "`k_descale`.*Hkv, Tk"),
        ({"v_descale": torch.ones(2).double()}, "`v_descale`.*float32"),
        ({"k_descale": torch.ones(3)}, "`k_descale`.*Tk = 12"),
        ({"cu_seqlens_k": None}, "`cu_seqlens_k`"),
        ({"cu_seqlens_k": int32(0, 4, 4, 13)}, "`cu_seqlens_k`.*12 tokens"),
        ({"v": given["v"].float()}, "`v`.*float8_e5m2"),
        ({"k": given["k"].float(), "v": given["v"].float(), "k_descale": torch.ones(2)}, "`k_descale`.*None"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){match}"):
            flashtile.attention_varlen(**given | changes)


def test_mistakes_of_pages() -> None:
    given = pages()
    flashtile.attention_varlen(**given)
    for changes, match in (
        ({"k_descale": given["k_descale"].half()}, "`k_descale`"),
        ({"k": given["k"].float(), "v": given["v"].float()}, "`k_descale`.*None"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){match}"):
            flashtile.attention_varlen(**given | changes)


@pytest.mark.parametrize("name", ["q", "k", "k_descale"])
def test_gradients_are_refused(name: str) -> None:
    """Also in a compiled program, and through the operators."""
    given = pages()
    with torch.no_grad():
        flashtile.attention_varlen(**given)
    given[name] = given[name].clone().requires_grad_()
    with pytest.raises(AttentionError, match=r"no derivatives.*\n.*no_grad"):
        flashtile.attention_varlen(**given)
    with pytest.raises(AttentionError, match=r"no derivatives|no_grad"):
        torch.func.vjp(lambda q: flashtile.attention_varlen(**given | {"q": q}), given["q"])
    with pytest.raises(AttentionError, match="no derivatives"):
        torch.func.jvp(lambda q: flashtile.attention_varlen(**given | {"q": q}), (given["q"],), (given["q"],))


def test_a_plan_says_what_it_reads() -> None:
    given = pages()
    explained = flashtile.explain(**given)
    assert "e5m2 keys and values" in explained.problem


# Caches made of others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("dtype", FORMATS)
def test_quantized_caches(dtype: torch.dtype, paged: bool) -> None:
    """The scales are of a shape that calls take, all numbers fit, and the error is that of the numbers."""
    k = torch.randn(3, 4, 6, 32) * torch.rand(3, 4, 6, 1)
    for per in ("head", "page" if paged else "sequence", "token"):
        values, descale, error = flashtile.quantize_kv(k, dtype, per=per, paged=paged)
        arguments: Arguments = {
            "q": torch.randn(3, 6 if paged else 4, 1, 32),
            "k_descale": descale,
            "v_descale": descale,
        }
        if paged:
            arguments["page_table"] = torch.arange(3, dtype=torch.int32)[:, None]
        wide = {"k_cache": k, "v_cache": k, "cache_seqlens": 4}
        found = call(arguments | wide | {"k_cache": values, "v_cache": values})
        del arguments["k_descale"], arguments["v_descale"]
        tolerance = {E4M3: 0.08, E5M2: 0.15, INT8: 0.04}[dtype]
        torch.testing.assert_close(found, call(arguments | wide), atol=tolerance, rtol=tolerance)
        assert 0 < float(error) < tolerance / 2
        assert values.float().abs().max() == magnitudes(dtype)[-1]
    for wrong in ({"per": "row"}, {"dtype": torch.uint8}, {"per": "sequence" if paged else "page"}):
        with pytest.raises(ArgumentError, match=f"`{next(iter(wrong))}`"):
            flashtile.quantize_kv(k, paged=paged, **wrong)


def test_layers_keep_8_bits() -> None:
    layer = flashtile.nn.Attention(64, 4, num_kv_heads=2, causal=True, rotary_dim=16)
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        expected = layer(x)
        for dtype in FORMATS:
            cache = layer.new_cache(2, 16, dtype=dtype)
            out = torch.cat([layer(x[:, :7], cache=cache), layer(x[:, 7:], cache=cache)], dim=1)
            torch.testing.assert_close(out, expected, atol=0.03, rtol=0.1)
            assert cache.k.dtype is dtype


def test_flash_attn_3_reads_8_bits() -> None:
    from flashtile.compat.flash_attn_3 import flash_attn_with_kvcache

    given = eight_bit(kind="sequences", held=(6, 6), new=None, queries=2, page_size=4, causal=True).arguments
    pages = {
        name: given[name] for name in ("k_cache", "v_cache", "cache_seqlens", "page_table", "k_descale", "v_descale")
    }
    out = flash_attn_with_kvcache(given["q"].transpose(1, 2), **pages, causal=True)
    assert torch.equal(out.transpose(1, 2), call(given))
    with pytest.raises(ArgumentError, match="`q_descale`"):
        flash_attn_with_kvcache(given["q"].transpose(1, 2), **pages, q_descale=given["k_descale"])
