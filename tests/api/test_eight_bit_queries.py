"""Queries of 8 bits: dense, packed and cached calls, dtypes, scales, names of other libraries, errors."""

from typing import Any

import pytest
import torch
from checking import assert_right, features, tile_size
from torch import Tensor

import flashtile
from flashtile import ArgumentError, AttentionError
from flashtile.compat import flash_attn_3
from flashtile.dispatch import fast_path
from flashtile.testing.case import Case
from flashtile.testing.eight_bit import KINDS_OF_Q, OUT_DTYPES, with_eight_bits, with_queries

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DESCALES = ("q_descale", "k_descale", "v_descale")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(
    dtype: torch.dtype = E4M3,
    of_q: str = "heads",
    of_keys: str = "heads",
    sizes: tuple[int, int, int, int] = (4, 2, 21, 34),
    **arguments: Any,
) -> Case:
    """Two sequences. `sizes` are query heads, key heads, queries and keys."""
    generator = torch.Generator().manual_seed(5)
    heads_q, heads_kv, rows, keys = sizes
    q, k, v = (torch.randn(2, h, n, 32, generator=generator) for h, n in ((heads_q, rows), *[(heads_kv, keys)] * 2))
    case = Case("attention", {"q": q.bfloat16(), "k": k.bfloat16(), "v": v.bfloat16()} | arguments)
    return with_queries(with_eight_bits(case, dtype, of_keys, of_keys, generator), of_q, None, generator)


def packed(of_q: str = "heads", of_keys: str = "heads", **arguments: Any) -> Case:
    """Sequences of 4, 0 and 7 keys, and three tokens of none."""
    generator = torch.Generator().manual_seed(6)
    q, k, v = (torch.randn(n, h, 16, generator=generator).bfloat16() for n, h in ((9, 4), (14, 2), (14, 2)))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": int32(0, 2, 3, 6), "cu_seqlens_k": int32(0, 4, 4, 11)}
    case = Case("attention_varlen", given | arguments)
    return with_queries(with_eight_bits(case, E5M2, of_keys, of_keys, generator), of_q, torch.float16, generator)


def result(case: Case, **options: Any) -> Tensor:
    return getattr(flashtile, case.function)(**case.arguments | options)  # type: ignore[no-any-return]


# What it computes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of_keys", ["none", "heads", "sequences", "tokens"])
@pytest.mark.parametrize("of_q", KINDS_OF_Q)
def test_scales(of_q: str, of_keys: str) -> None:
    out_dtype = OUT_DTYPES[KINDS_OF_Q.index(of_q)]
    with tile_size(16, 16):
        for case in (dense(of_q=of_q, of_keys=of_keys, causal=True), packed(of_q, of_keys, causal=True)):
            case.arguments["out_dtype"] = out_dtype
            assert_right(case)
            assert result(case).dtype is (out_dtype or torch.bfloat16)


@pytest.mark.parametrize("name", sorted(features().keys() - {"dropout", "head_dim_v", "multi-head"}))
def test_every_score_feature(name: str) -> None:
    """They see scores of numbers that are multiplied by their scales, in the contract's order."""
    assert_right(dense(E5M2, "tokens", "tokens", (2, 1, 7, 9), **features()[name]))


def test_keys_of_8_bits_under_wider_queries() -> None:
    for dtype in (torch.float32, torch.float64):
        case = dense(torch.int8, of_keys="tokens")
        del case.arguments["q_descale"]
        case.arguments["q"] = torch.randn(2, 4, 21, 32, dtype=dtype)
        assert_right(case)


@pytest.mark.parametrize("paged", [False, True])
def test_caches(paged: bool) -> None:
    """Over a cache, with new keys in bfloat16 that are quantized, and without."""
    case = dense(of_q="tokens", of_keys="heads", causal=True)
    given: dict[str, Any] = {name: case.arguments[name] for name in ("q", *DESCALES)} | {"causal": True}
    k, v = (torch.cat((case.arguments[x].float(), torch.zeros(2, 2, 6, 32)), 2).to(E4M3) for x in "kv")
    if paged:
        k, v = (x.transpose(1, 2).reshape(-1, 8, 2, 32) for x in (k, v))
        given["page_table"] = torch.arange(10).view(2, 5).int()
    expected = result(case)
    out = flashtile.attention_with_kvcache(k_cache=k, v_cache=v, cache_seqlens=34, **given)
    torch.testing.assert_close(out, expected, atol=0.01, rtol=0.01)
    new = {x: case.arguments[x][:, :, 30:].float() * case.arguments[f"{x}_descale"][:, None, None] for x in "kv"}
    for dtype in (torch.bfloat16, torch.float32):
        caches: dict[str, Any] = {"k_cache": k.clone(), "v_cache": v.clone()}
        rounded: dict[str, Any] = {x: y.to(dtype) for x, y in new.items()}
        for _ in range(3):
            out = flashtile.attention_with_kvcache(**caches, **rounded, cache_seqlens=30, **given)
            torch.testing.assert_close(out, expected, atol=0.02, rtol=0.05)


def test_long_rows_of_ones() -> None:
    """The sums of many weights are exact where all values are 1, and lose none of a long tail."""
    q, k = (torch.randn(1, 1, n, 64) for n in (2, 2**15))
    v = torch.ones(1, 1, 2**15, 64)
    v[:, :, 0] = 2.0
    k[:, :, 0] = q[:, :, 0] * 1.5  # most of the weight of the first row
    stored: dict[str, Any] = {name: x.to(E4M3) for name, x in (("q", q), ("k", k), ("v", v))}
    out = flashtile.attention(**stored, out_dtype=torch.float32)
    wide = flashtile.attention(*(x.double() for x in stored.values()))
    torch.testing.assert_close(out.double(), wide, atol=1e-6, rtol=1e-6)


def test_repeated_and_compiled_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in (dense(of_q="tokens", of_keys="tokens"), packed("tokens", "sequences", max_seqlen_k=7)):
        expected = result(case)
        for enabled in (True, False):
            monkeypatch.setattr(fast_path, "enabled", enabled)
            for factor in (1.0, 1.0, 2.0, 1.0):
                other = result(case, v_descale=case.arguments["v_descale"] * factor)
                assert torch.equal(other.float(), expected.float() * factor)
        torch._dynamo.reset()
        function = getattr(flashtile, case.function)
        with torch.no_grad():
            compiled = torch.compile(
                lambda function=function, case=case: function(**case.arguments), backend="aot_eager"
            )
            assert torch.equal(compiled(), expected)


def test_exported() -> None:
    case = dense(of_q="tokens")

    class Model(torch.nn.Module):
        def forward(self, given: dict[str, Any]) -> Tensor:
            return flashtile.attention(**given, causal=True, out_dtype=torch.float16)

    given = {name: case.arguments[name] for name in ("q", "k", "v", *DESCALES)}
    with torch.no_grad():
        exported = torch.export.export(Model(), (given,)).module()
        assert torch.equal(exported(given), Model()(given))


def test_out_is_written() -> None:
    case = dense(out_dtype=torch.float16)
    expected = result(case)
    for _ in range(3):
        out = torch.empty_like(expected)
        assert result(case, out=out) is out
        assert torch.equal(out, expected)
    with pytest.raises(ArgumentError, match=r"(?s)`out`.*float16"):
        result(case, out=out.float())


def test_a_plan_says_what_it_reads() -> None:
    explained = flashtile.explain(**dense(out_dtype=torch.float32).arguments)
    assert "float8_e4m3fn with e4m3 keys and values" in explained.problem
    assert "out in float32" in explained.problem
    assert explained.backward == explained.tangents == "none"


# Names of other libraries ---------------------------------------------------------------------------------------------


def test_flash_attn_3() -> None:
    """Scales of sequences and key heads, also where they could be those of tokens."""
    case = dense(of_q="sequences", of_keys="sequences", causal=True)
    given = case.arguments
    q, k, v = (given[x].transpose(1, 2) for x in "qkv")
    scales = {name: given[name] for name in DESCALES}
    out, lse = flash_attn_3.flash_attn_func(q, k, v, causal=True, **scales, return_attn_probs=True)
    expected, expected_lse = result(case, return_lse=True)
    assert torch.equal(out.transpose(1, 2), expected)
    assert torch.equal(lse, expected_lse)
    ends: dict[str, Any] = {
        "cu_seqlens_q": int32(0, 21, 42),
        "cu_seqlens_k": int32(0, 34, 68),
        "max_seqlen_q": 21,
        "max_seqlen_k": 34,
    }
    rows = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_3.flash_attn_varlen_func(*rows, **ends, causal=True, **scales)
    torch.testing.assert_close(out.unflatten(0, (2, -1)).transpose(1, 2), expected)
    out = flash_attn_3.flash_attn_with_kvcache(q, k, v, cache_seqlens=34, causal=True, **scales)
    torch.testing.assert_close(out.transpose(1, 2), expected)


# Errors ---------------------------------------------------------------------------------------------------------------

ONES = torch.ones(2)
MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "wider keys": ("k", {"k": torch.ones(2, 2, 34, 32), "v": torch.ones(2, 2, 34, 32), "k_descale": None}),
    "queries of e5m2": ("q", {"q": torch.ones(2, 4, 21, 32).to(E5M2)}),
    "queries of int8": ("q", {"q": torch.ones(2, 4, 21, 32, dtype=torch.int8)}),
    "scales of another dtype": ("q_descale", {"q_descale": ONES.half()}),
    "scales of other heads": ("q_descale", {"q_descale": torch.ones(4)}),
    "scales of other rows": ("q_descale", {"q_descale": torch.ones(2, 4, 34)}),
    "scales of other keys": ("v_descale", {"v_descale": torch.ones(2, 2, 21)}),
    "dropout": ("dropout_p", {"dropout_p": 0.1}),
    "a result of 64 bits": ("out_dtype", {"out_dtype": torch.float64}),
    "a result that is no dtype": ("out_dtype", {"out_dtype": "float16"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    argument, changes = MISTAKES[name]
    with pytest.raises(ArgumentError, match=f"`{argument}`"):
        result(dense(), **changes)


def test_mistakes_of_wider_queries() -> None:
    q, k = torch.ones(2, 4, 3, 16), torch.ones(2, 2, 5, 16)
    mistakes: tuple[dict[str, Any], ...] = {"q_descale": ONES}, {"k_descale": ONES}, {"out_dtype": torch.float32}
    for changes in mistakes:
        with pytest.raises(ArgumentError, match=f"`{next(iter(changes))}`"):
            flashtile.attention(q, k, k, **changes)


def test_scales_that_may_be_of_tokens_or_sequences() -> None:
    q, k = torch.ones(2, 2, 16).to(E4M3), torch.ones(2, 2, 16).to(E4M3)
    ends = int32(0, 1, 2)
    for name in ("q_descale", "k_descale"):
        scales: dict[str, Any] = {name: torch.ones(2, 2)}
        with pytest.raises(ArgumentError, match=f"(?s)`{name}`.*tokens"):
            flashtile.attention_varlen(q, k, k, ends, ends, **scales)


def test_new_keys_and_rotary_positions() -> None:
    case = dense()
    given: dict[str, Any] = {"q": case.arguments["q"], "k_cache": case.arguments["k"], "v_cache": case.arguments["v"]}
    new = torch.ones(2, 2, 1, 32)
    mistakes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("k", {"k": new.to(E4M3), "v": new.to(E4M3)}),
        ("rotary_cos", {"rotary_cos": torch.ones(40, 8), "rotary_sin": torch.ones(40, 8)}),
    )
    for argument, changes in mistakes:
        with pytest.raises(ArgumentError, match=f"`{argument}`"):
            flashtile.attention_with_kvcache(**given, cache_seqlens=30, **changes)


def test_derivatives_are_refused() -> None:
    case = dense()
    scale = case.arguments["v_descale"].clone().requires_grad_()
    with pytest.raises(AttentionError, match=r"no derivatives.*\n.*no_grad"):
        result(case, v_descale=scale)
    with torch.no_grad():
        result(case, v_descale=scale)
    with pytest.raises(AttentionError, match="no derivatives"):
        torch.func.jvp(lambda x: result(case, v_descale=x), (scale.detach(),), (scale.detach(),))
