"""Keys and values of 8 bits in Triton's kernels, in its interpreter: attention, and what `append_kernel` stores."""

import os
from typing import Any

import pytest
import torch
from cached import same_bits
from checking import assert_right
from forced import first, forced

import flashtile
from flashtile.backend.triton import support
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.dispatch import fast_path
from flashtile.testing.case import CACHES, Case
from flashtile.testing.eight_bit import FORMATS, with_eight_bits, with_queries
from flashtile.testing.generate import random_case
from flashtile.testing.oracle.eight_bit import magnitudes

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
KINDS = ("none", "heads", "sequences", "pages", "tokens")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", FORMATS)
def test_formats_and_scales(dtype: torch.dtype, kind: str) -> None:
    number = KINDS.index(kind) + len(KINDS) * FORMATS.index(dtype)
    seeds = (1, 2, 4, 5, 8, 9)  # small ones
    case = random_case(seeds[number % 6], dtypes=(torch.float16, torch.float32), function="attention_with_kvcache")
    case.arguments["num_splits"] = (None, 1, 3)[number % 3]
    assert_right(with_eight_bits(case, dtype, kind, KINDS[number % 5], torch.Generator().manual_seed(2)), "triton")


@pytest.mark.parametrize(
    ("page_size", "kind", "width", "width_v"),
    [(None, "tokens", 80, 32), (16, "tokens", 62, 48), (56, "pages", 64, 64), (None, "heads", 32, 31)],
)
def test_tiles_of_8_rows(page_size: int | None, kind: str, width: int, width_v: int) -> None:
    """`kernels.few_rows`, where keys are rows of scores and of sums, by bytes and by words of two features."""
    q, k, v = torch.randn(2, 4, 1, width), torch.randn(2, 2, 112, width), torch.randn(2, 2, 112, width_v)
    given: dict[str, Any] = {"q": q.half(), "cache_seqlens": torch.tensor([109, 0], dtype=torch.int32), "causal": True}
    if page_size is not None:
        k, v = (x.transpose(1, 2).reshape(-1, page_size, 2, x.shape[-1]) for x in (k, v))
        given["page_table"] = torch.arange(len(k)).view(2, -1).flip(1).int()
    case = Case("attention_with_kvcache", given | {"k_cache": k.half(), "v_cache": v.half()})
    fast_path.forget()
    with forced(support, first(forward=KernelConfig(8, 32, 1, 1), given_splits=None, pack_gqa=2)):
        for dtype in FORMATS:
            assert_right(with_eight_bits(case, dtype, kind, kind), "triton")
    fast_path.forget()


@pytest.mark.parametrize("kind", ["heads", "tokens"])
@pytest.mark.parametrize("dtype", FORMATS)
def test_appended_numbers_are_those_of_torch(dtype: torch.dtype, kind: str) -> None:
    """All numbers of the format, halfway between two, beyond the largest, zeros of both signs, NaN."""
    grid = magnitudes(dtype)
    numbers = torch.cat((grid, (grid[1:] + grid[:-1]) / 2, grid[-1:] * 1.5, grid.new_tensor([torch.inf, torch.nan])))
    numbers = torch.cat((numbers, -numbers)).float()
    numbers = numbers.repeat(-(-1024 // len(numbers)))[:1024].view(1, 2, 16, 32)
    found = []
    for backend in ("triton", "tiled"):
        caches: dict[str, Any] = {f"{x}_cache": torch.zeros(1, 2, 20, 32).to(dtype) for x in "kv"}
        shape = (1, 2, 20) if kind == "tokens" else (2,)
        caches |= {f"{x}_descale": torch.full(shape, 3.0) for x in "kv"}
        new = {"k": numbers, "v": numbers * 3, "cache_seqlens": 2}
        flashtile.attention_with_kvcache(numbers[:, :, :1].nan_to_num(), **caches, **new, backend=backend)
        found.append(caches)
    assert all(same_bits(found[0][name].float(), found[1][name].float()) for name in CACHES)


@pytest.mark.parametrize(
    ("function", "of_q", "of_v"),
    [
        ("attention", "tokens", "tokens"),
        ("attention_varlen", "sequences", "heads"),
        ("attention_with_kvcache", "heads", "pages"),
    ],
)
def test_queries_of_8_bits(function: str, of_q: str, of_v: str) -> None:
    """Dense and packed keys, which the launch makes pages, and a cache."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, h, n, 32, generator=generator).bfloat16() for h, n in ((2, 5), (1, 20), (1, 20)))
    given: dict[str, Any] = {"q": q, "k": k, "v": v, "causal": True}
    if function == "attention_varlen":
        given |= {name: x.transpose(1, 2).flatten(0, 1) for name, x in (("q", q), ("k", k), ("v", v))}
        given |= {f"cu_seqlens_{x}": torch.tensor([0, n, 2 * n]).int() for x, n in (("q", 5), ("k", 20))}
    elif function == "attention_with_kvcache":
        given = {"q": q[:, :, :1], "k_cache": k, "v_cache": v, "cache_seqlens": torch.tensor([20, 9]).int()}
    case = with_eight_bits(Case(function, given), FORMATS[0], "tokens", of_v, generator)
    assert_right(with_queries(case, of_q, None, generator), "triton")
