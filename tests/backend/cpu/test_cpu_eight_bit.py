"""Keys and values of 8 bits in the CPU's kernels, decoding and for many rows."""

from typing import Any

import pytest
import torch
from checking import assert_right

import flashtile
from flashtile import BackendError
from flashtile.backend.cpu import support, targets
from flashtile.testing.case import Case
from flashtile.testing.eight_bit import FORMATS, with_eight_bits
from flashtile.testing.oracle.eight_bit import magnitudes

pytestmark = pytest.mark.skipif(support.unusable() is not None, reason="no kernels for this machine")
E4M3, E5M2, INT8 = FORMATS


def case(rows: int, page_size: int | None, **features: Any) -> Case:
    """Two sequences, the second one shorter, with an odd number of keys."""
    q, k, v = torch.randn(2, 4, rows, 64), torch.randn(2, 2, 210, 64), torch.randn(2, 2, 210, 32)
    given = {"q": q.bfloat16(), "cache_seqlens": torch.tensor([207, 30], dtype=torch.int32), "causal": True}
    if page_size is not None:
        k, v = (x.transpose(1, 2).reshape(-1, page_size, 2, x.shape[-1]) for x in (k, v))
        given["page_table"] = torch.arange(len(k)).view(2, -1).flip(1).int()
    return Case("attention_with_kvcache", given | {"k_cache": k.bfloat16(), "v_cache": v.bfloat16()} | features)


@pytest.mark.parametrize(
    ("dtype", "of_k", "of_v", "page_size"),
    [
        (E4M3, "tokens", "tokens", None),
        (E4M3, "heads", "tokens", 30),
        (E5M2, "pages", "sequences", 30),
        (INT8, "tokens", "none", 30),
    ],
)
def test_decoding(dtype: torch.dtype, of_k: str, of_v: str, page_size: int | None) -> None:
    """Blocks that lie in one page, or in several; scores of few rows are packed."""
    for rows in (1, 3):
        assert_right(with_eight_bits(case(rows, page_size), dtype, of_k, of_v), "cpu")


def test_many_rows_and_features() -> None:
    bias = torch.randn(1, 4, 1, 210)
    assert_right(with_eight_bits(case(70, 30), INT8, "heads", "pages"), "cpu")
    given = case(70, None, softcap=2.0, bias=bias, dropout_p=0.3, dropout_seed=3)
    assert_right(with_eight_bits(given, E5M2, "tokens", "tokens"), "cpu")


@pytest.mark.parametrize("vectors", ["baseline", "avx2"])
def test_narrow_vectors(vectors: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(targets.VECTORS_VARIABLE, vectors)
    try:
        targets.host()
    except BackendError:
        pytest.skip(f"this processor has no {vectors}")
    assert_right(with_eight_bits(case(1, None), E4M3, "tokens", "heads"), "cpu")


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_number(dtype: torch.dtype) -> None:
    """The value of a single key is the output, to the bit."""
    numbers = magnitudes(dtype).float()
    numbers = torch.cat((numbers, -numbers, torch.tensor([] if dtype is torch.int8 else [torch.nan, -torch.nan])))
    v_cache = torch.zeros(1, 1, 1, 256).to(dtype)
    v_cache.view(torch.int8)[..., : len(numbers)] = numbers.to(dtype).view(torch.int8)
    k_cache = torch.zeros(1, 1, 1, 16).to(dtype)
    for q in (torch.zeros(1, 1, 1, 16), torch.zeros(1, 80, 1, 16)):
        out = flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=1, backend="cpu")
        expected = v_cache.float().expand(out.shape)
        assert torch.equal(out.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def test_repeated_calls_read_the_scales_of_each() -> None:
    """Recorded launches, which take the addresses of scales anew, and appends, which none repeats."""
    for new in (False, True):
        given = with_eight_bits(case(1, None), FORMATS[0], "heads", "heads").arguments
        for factor in (1.0, 2.0, 3.0, 4.0):
            arguments = given | {"v_descale": given["v_descale"] * factor}
            arguments |= {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
            if new:
                arguments |= {x: torch.randn(2, 2, 1, n).bfloat16() for x, n in (("k", 64), ("v", 32))}
            out = flashtile.attention_with_kvcache(**arguments, backend="cpu")
            expected = flashtile.attention_with_kvcache(**arguments, backend="tiled")
            torch.testing.assert_close(out, expected, atol=0.02, rtol=0.02)
