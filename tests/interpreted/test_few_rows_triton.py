"""Tiles of 8 rows (`kernels.few_rows`), which only chips with the most shared memory have, in Triton's interpreter."""

import os
from typing import Any

import pytest
import torch
from forced import first, forced

import flashtile
from flashtile.backend.triton import support
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.dispatch import fast_path

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
KEYS, LENGTHS = 112, (109, 64, 1)
CASES: dict[str, dict[str, Any]] = {  # heads of queries and keys, queries, width; options
    "one query": {"sizes": (2, 2, 1, 64)},
    "two chunks in a window": {"sizes": (4, 2, 2, 80), "causal": True, "window": (40, 0), "softcap": 2.0},
    "a sink and padding": {"sizes": (3, 3, 1, 16), "sinks": torch.ones(3), "leftpad_k": torch.tensor([40, 0, 0]).int()},
    "slopes": {"sizes": (4, 1, 1, 32), "causal": True, "alibi_slopes": torch.tensor([0.3, 0.1, 0.05, 0.02])},
    "small pages": {"sizes": (2, 1, 3, 16), "page_size": 16, "causal": True},
    "large pages": {"sizes": (2, 2, 1, 48), "page_size": 56},
}


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_tiles_of_8_rows(name: str, num_splits: int) -> None:
    """What is not in use is NaN. Scores grow, so that the maximum changes in each block."""
    options = dict(CASES[name])
    heads, heads_kv, rows, width = options.pop("sizes")
    page_size = options.pop("page_size", None)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(len(LENGTHS), h, n, width, generator=generator).half()
        for h, n in ((heads, rows), (heads_kv, KEYS), (heads_kv, KEYS))
    )
    k *= torch.linspace(0.2, 3, KEYS)[:, None]
    lengths = torch.tensor([max(n, rows) for n in LENGTHS], dtype=torch.int32)
    unused = (torch.arange(KEYS) >= lengths[:, None])[:, None, :, None]
    expected = flashtile.attention_with_kvcache(
        q, k, v, cache_seqlens=lengths, backend="reference", return_lse=True, **options
    )
    caches = [x.masked_fill(unused, torch.nan) for x in (k, v)]
    if page_size is not None:
        order = torch.randperm(len(LENGTHS) * KEYS // page_size, generator=generator)
        options["page_table"] = order.argsort().view(len(LENGTHS), -1).int()
        caches = [x.transpose(1, 2).reshape(-1, page_size, heads_kv, width)[order] for x in caches]
    few_rows = first(forward=KernelConfig(8, 32, 1, 1), given_splits=None, pack_gqa=heads // heads_kv)
    fast_path.forget()
    with forced(support, few_rows):
        found = flashtile.attention_with_kvcache(
            q, *caches, cache_seqlens=lengths, backend="triton", return_lse=True, num_splits=num_splits, **options
        )
    fast_path.forget()
    for x, y, tolerance in zip(found, expected, (2e-3, 1e-4), strict=True):
        torch.testing.assert_close(x.float(), y.float(), atol=tolerance, rtol=tolerance)
