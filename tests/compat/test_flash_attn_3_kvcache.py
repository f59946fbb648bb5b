"""FlashAttention-3's cache with padding in front: windows and chunks count from the first key that exists."""

from typing import Any

import pytest
import torch
from flash_formula import assert_same, formula, randn, rotated

from flashtile.compat.flash_attn_3 import flash_attn_with_kvcache

HQ, HKV, D, ROOM = 4, 2, 8, 20
LENGTHS, PADS = torch.tensor([9, 14, 3], dtype=torch.int32), torch.tensor([2, 5, 0], dtype=torch.int32)
K, V = randn(3, ROOM, HKV, D, seed=1), randn(3, ROOM, HKV, D, seed=2)


@pytest.mark.parametrize(
    ("packed", "paged", "new", "settings"),
    [
        (False, False, False, {}),
        (True, True, True, {"causal": True}),
        (True, False, True, {"window_size": (4, 1)}),
    ],
)
def test_chunks_begin_at_the_first_key(packed: bool, paged: bool, new: bool, settings: dict[str, Any]) -> None:
    """Keys in front of `cache_leftpad` shift neither chunks nor windows, but rotary positions."""
    counts = [1, 3, 2] if packed else [3, 3, 3]
    cu = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    tokens = int(cu[-1])
    q, k, v = randn(tokens, HQ, D), randn(tokens, HKV, D, seed=3), randn(tokens, HKV, D, seed=4)
    cos, sin = randn(ROOM, 2).cos(), randn(ROOM, 2).sin()
    k_cache, v_cache = K.clone(), V.clone()
    more: dict[str, Any] = {"cu_seqlens_q": cu, "max_seqlen_q": max(counts)} if packed else {}
    if paged:
        k_cache, v_cache = (x.reshape(-1, 4, HKV, D) for x in (k_cache, v_cache))
        more["page_table"] = torch.arange(15, dtype=torch.int32).view(3, 5)
    if new:
        more |= {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin}
    out = flash_attn_with_kvcache(
        q if packed else q.unflatten(0, (3, 3)), k_cache, v_cache, cache_seqlens=LENGTHS, cache_leftpad=PADS,
        attention_chunk=3, **more, **settings,
    )  # fmt: skip
    out = out if packed else out.flatten(0, 1)
    for b, (length, pad) in enumerate(zip(LENGTHS.tolist(), PADS.tolist(), strict=True)):
        rows = slice(int(cu[b]), int(cu[b + 1]))
        row, keys, values = q[None, rows], K[b, pad:length], V[b, pad:length]
        if new:
            positions = length + torch.arange(counts[b])[None]
            row = rotated(row, cos, sin, positions, True)
            keys = torch.cat((keys, rotated(k[None, rows], cos, sin, positions, True)[0]))
            values = torch.cat((values, v[rows]))
        assert_same((out[rows], formula(row, keys[None], values[None], chunk=3, **settings)[0][0]))
