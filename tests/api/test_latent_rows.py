"""Latent rows of 656 bytes: packing, caches in dense rows and pages, and what is refused."""

from typing import Any

import pytest
import torch
from checking import assert_right
from torch import Tensor

import flashtile
from flashtile import ArgumentError
from flashtile.dispatch import fast_path
from flashtile.testing.generate import random_case
from flashtile.testing.latent import latent
from flashtile.testing.packed_rows import packed_rows

D, DV = 576, 512
SCALE = 192**-0.5


def random_rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def cached(dtype: torch.dtype = torch.float32, **more: Any) -> dict[str, Any]:
    """A step of decoding over a dense cache of bytes."""
    rows, _ = flashtile.pack_latent_rows(random_rows(2, 1, 40, D))
    given = {"q": random_rows(2, 4, 1, D, dtype=dtype), "k": random_rows(2, 1, 1, D, dtype=dtype), "k_cache": rows}
    lengths = torch.tensor([33, 0], dtype=torch.int32)
    return given | {"v_cache": None, "v_dim": DV, "cache_seqlens": lengths, "causal": True, "scale": SCALE} | more


@pytest.mark.parametrize("seed", range(4))
def test_random_problems(seed: int) -> None:
    """Dense caches and pages against the oracle, with all features and appended keys."""
    case = packed_rows(latent(random_case(seed, function="attention_with_kvcache")))
    assert_right(case, "tiled", "auto")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_packed_and_unpacked(dtype: torch.dtype) -> None:
    """Zeros, NaN and large numbers; the relative error; numbers that have a place stay."""
    x = random_rows(3, 5, D, dtype=dtype)
    x[0, 0, :128], x[1, 2, 130], x[2] = 0.0, torch.nan, 1000 * x[2]
    rows, error = flashtile.pack_latent_rows(x)
    assert error.isnan()
    numbers = flashtile.unpack_latent_rows(rows, dtype)
    assert numbers[0, 0, :128].eq(0).all()
    assert numbers[1, 2, 130].isnan()
    assert numbers.isnan().sum() == 1
    torch.testing.assert_close(numbers, x, rtol=2**-4, atol=2**-9 * 4000, equal_nan=True)
    largest = rows[..., 512:528].contiguous().view(torch.float32)
    assert torch.equal(largest[2], x[2, :, :DV].float().unflatten(-1, (4, 128)).abs().amax(-1) / 448)
    assert torch.equal(flashtile.unpack_latent_rows(rows.view(torch.float8_e4m3fn), dtype).isnan(), numbers.isnan())
    again, error = flashtile.pack_latent_rows(numbers.nan_to_num())
    assert error < 2**-8  # scales are rounded once more
    strided = torch.empty(3, 5, 657, dtype=torch.uint8)[..., 1:].copy_(again)
    assert torch.equal(flashtile.unpack_latent_rows(strided, dtype), flashtile.unpack_latent_rows(again, dtype))


def test_repeated_calls() -> None:
    """Each call appends and attends as the first one did, also over a cache that is called float8_e4m3fn."""
    fast_path.forget()
    calls = [cached() for _ in range(4)]
    calls[2]["k_cache"] = calls[2]["k_cache"].view(torch.float8_e4m3fn)
    outs = [flashtile.attention_with_kvcache(**call) for call in calls]
    numbers = flashtile.unpack_latent_rows(calls[0]["k_cache"], torch.float32)
    plain: dict[str, Any] = calls[0] | {"k_cache": numbers, "k": None, "cache_seqlens": calls[0]["cache_seqlens"] + 1}
    expected = flashtile.attention_with_kvcache(**plain)
    for call, out in zip(calls, outs, strict=True):
        assert torch.equal(call["k_cache"].view(torch.uint8), calls[0]["k_cache"])
        torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_few_pages_of_a_large_cache() -> None:
    """Pages that the table names are copied; entries that name none stay so."""
    pages, _ = flashtile.pack_latent_rows(random_rows(50, 8, 1, D))
    table = torch.tensor([[49, 3, 7], [0, -1, 99]], dtype=torch.int32)
    lengths = torch.tensor([20, 8], dtype=torch.int32)
    call = cached(k_cache=pages, page_table=table, cache_seqlens=lengths, k=None)
    numbers = flashtile.unpack_latent_rows(pages, torch.float32)
    plain: dict[str, Any] = call | {"k_cache": numbers}
    expected = flashtile.attention_with_kvcache(**plain)
    torch.testing.assert_close(flashtile.attention_with_kvcache(**call), expected, rtol=1e-6, atol=1e-6)


def test_compiled() -> None:
    call, eager = cached(), cached()
    function = torch.compile(flashtile.attention_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(function(**call), flashtile.attention_with_kvcache(**eager))
    assert torch.equal(call["k_cache"], eager["k_cache"])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"v_dim": 256}, "k_cache"),
        ({"q": torch.zeros(2, 4, 1, 512)}, "k_cache"),
        ({"k_cache": torch.zeros(2, 1, 40, 655, dtype=torch.uint8)}, "k_cache"),
        ({"k_cache": torch.zeros(2, 1, 40, 1312, dtype=torch.uint8)[..., ::2]}, "k_cache"),
        ({"k": torch.zeros(2, 1, 1, 656)}, "k"),
        ({"q": torch.zeros(2, 4, 1, 576).to(torch.float8_e4m3fn)}, "q"),
        ({"k_descale": torch.ones(1)}, "k_descale"),
    ],
)  # fmt: skip
def test_errors(given: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError) as error:
        flashtile.attention_with_kvcache(**cached() | given)
    assert error.value.argument == named


def test_errors_of_packing() -> None:
    for call in (
        lambda: flashtile.pack_latent_rows(torch.zeros(3, 575)),
        lambda: flashtile.pack_latent_rows(torch.zeros(3, D, dtype=torch.int32)),
        lambda: flashtile.unpack_latent_rows(torch.zeros(3, 656)),
        lambda: flashtile.unpack_latent_rows(torch.zeros(3, 655, dtype=torch.uint8)),
        lambda: flashtile.unpack_latent_rows(torch.zeros(3, 656, dtype=torch.uint8), torch.int8),
    ):
        with pytest.raises(ArgumentError):
            call()
