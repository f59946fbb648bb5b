"""`flash_attn_with_kvcache`: dense and paged caches, appended keys, rotary positions as FlashAttention counts them."""

from typing import Any

import pytest
import torch
from flash_formula import assert_same, formula, randn, rotated
from torch import Tensor

from flashtile.compat.flash_attn import flash_attn_with_kvcache
from flashtile.errors import ArgumentError

B, HQ, HKV, D, ROWS, ROOM, PAGE = 3, 4, 2, 8, 5, 24, 3
LENGTHS = torch.tensor([5, 0, 11], dtype=torch.int32)
FREQUENCY = 100.0 ** -(torch.arange(3, dtype=torch.float64) / 3)
ANGLES = torch.arange(ROOM, dtype=torch.float64)[:, None] * FREQUENCY  # [positions, rotary_dim / 2], and D > rotary_dim
COS, SIN = ANGLES.cos(), ANGLES.sin()


class Cache:
    """Random caches, and the keys and values of each sequence after a call, from the definition."""

    def __init__(self, *, paged: bool = False, rows: Tensor | None = None):
        self.k, self.v = randn(ROWS, ROOM, HKV, D, seed=1), randn(ROWS, ROOM, HKV, D, seed=2)
        self.rows = torch.arange(B) if rows is None else rows
        self.table: Tensor | None = None
        if paged:
            order = torch.randperm(ROWS * ROOM // PAGE, generator=torch.Generator().manual_seed(0)).to(torch.int32)
            self.table = order[: B * ROOM // PAGE].view(B, -1)
            self.pages = [torch.full((len(order), PAGE, HKV, D), torch.nan, dtype=torch.float64) for _ in range(2)]
            for pages, x in zip(self.pages, (self.k, self.v), strict=True):
                pages[self.table.long()] = x[:B].unflatten(1, (-1, PAGE))

    def arguments(self) -> tuple[Tensor, Tensor]:
        return (self.k.clone(), self.v.clone()) if self.table is None else (self.pages[0], self.pages[1])

    def read(self, cache: Tensor, b: int) -> Tensor:
        """Sequence b's slots `[ROOM, Hkv, D]`."""
        return cache[self.rows[b]] if self.table is None else cache[self.table[b].long()].flatten(0, 1)


def expected(
    cache: Cache, q: Tensor, new: tuple[Tensor, Tensor] | None, pads: list[int], rotary: bool, **settings: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Results, and each sequence's keys after the call."""
    outs, lses, keys = [], [], []
    interleaved = settings.pop("rotary_interleaved", True)
    together = settings.get("causal", False) or settings.get("window_size", (-1, -1)) != (-1, -1)
    for b, length in enumerate(LENGTHS.tolist()):
        k, v = cache.k[cache.rows[b], :length], cache.v[cache.rows[b], :length]
        row = q[b : b + 1]
        if new is not None:
            k_new = new[0][b : b + 1]
            if rotary:
                steps = torch.arange(row.shape[1]) if together else torch.zeros(row.shape[1], dtype=torch.int64)
                row = rotated(row, COS, SIN, length + steps[None], interleaved)
                k_new = rotated(k_new, COS, SIN, length + torch.arange(k_new.shape[1])[None], interleaved)
            k, v = torch.cat((k, k_new[0])), torch.cat((v, new[1][b]))
        out, lse, _ = formula(row, k[None], v[None], first_key=pads[b], **settings)
        outs.append(out)
        lses.append(lse)
        keys.append(k)
    return torch.cat(outs), torch.cat(lses), keys


@pytest.mark.parametrize("rotary", [None, True, False], ids=["plain", "interleaved", "halves"])
@pytest.mark.parametrize("appended", [0, 1, 4])
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
@pytest.mark.parametrize("settings", [{}, {"causal": True}, {"window_size": (4, 1), "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_results_and_caches(
    seqlen_q: int, settings: dict[str, Any], paged: bool, appended: int, rotary: bool | None
) -> None:
    if rotary is not None and appended == 0:
        return  # declined
    cache, q = Cache(paged=paged), randn(B, seqlen_q, HQ, D)
    new = (randn(B, appended, HKV, D, seed=3), randn(B, appended, HKV, D, seed=4)) if appended else None
    k_cache, v_cache = cache.arguments()
    turns = {} if rotary is None else {"rotary_cos": COS, "rotary_sin": SIN, "rotary_interleaved": rotary}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, *(new or ()), cache_seqlens=LENGTHS, block_table=cache.table,
        return_softmax_lse=True, **settings, **turns,
    )  # fmt: skip
    interleaved = {"rotary_interleaved": rotary} if rotary is not None else {}
    reference, reference_lse, keys = expected(cache, q, new, [0] * B, rotary is not None, **settings, **interleaved)
    assert_same((out, reference), (lse, reference_lse))
    for b, k in enumerate(keys):
        held = cache.read(k_cache, b)
        assert_same((held[: len(k)], k))
        assert torch.equal(held[len(k) :], cache.k[cache.rows[b], len(k) :])


def test_rows_padding_and_slopes() -> None:
    rows = torch.tensor([4, 1, 0], dtype=torch.int32)
    pads = torch.tensor([2, 0, 7], dtype=torch.int32)
    slopes = randn(B, HQ).abs()
    cache, q = Cache(rows=rows), randn(B, 2, HQ, D)
    new = randn(B, 2, HKV, D, seed=3), randn(B, 2, HKV, D, seed=4)
    k_cache, v_cache = cache.arguments()
    turns = {"rotary_cos": COS, "rotary_sin": SIN}
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, **turns, cache_seqlens=LENGTHS, cache_batch_idx=rows, cache_leftpad=pads,
        causal=True, alibi_slopes=slopes, softmax_scale=0.5, num_splits=2,
    )  # fmt: skip
    for b in range(B):
        mine = expected(cache, q, new, pads.tolist(), True, causal=True, scale=0.5, alibi_slopes=slopes[b])[0]
        assert_same((out[b], mine[b]))


def test_lengths() -> None:
    """An int is every sequence's length, and `None` a full cache."""
    cache, q = Cache(), randn(B, 2, HQ, D)
    k_cache, v_cache = (x[:B] for x in cache.arguments())
    for length, kept in ((None, ROOM), (7, 7), (ROOM, ROOM)):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True)
        assert_same((out, formula(q, cache.k[:B, :kept], cache.v[:B, :kept], causal=True)[0]))
    paged = Cache(paged=True)
    out = flash_attn_with_kvcache(q, *paged.arguments(), block_table=paged.table)
    assert_same((out, formula(q, paged.k[:B], paged.v[:B])[0]))


def test_declined() -> None:
    cache, q = Cache(), randn(B, 2, HQ, D)
    k_cache, v_cache = (x[:B] for x in cache.arguments())
    with pytest.raises(ArgumentError, match="`cache_seqlens`"):
        flash_attn_with_kvcache(q, k_cache, v_cache, q[:, :, :2], q[:, :, :2])
    with pytest.raises(ArgumentError, match="`rotary_cos`"):
        flash_attn_with_kvcache(q, k_cache, v_cache, rotary_cos=COS, rotary_sin=SIN, cache_seqlens=3)
    new = q[:, :, :2]
    with pytest.raises(ArgumentError, match="`rotary_sin`"):
        flash_attn_with_kvcache(q, k_cache, v_cache, new, new, rotary_cos=COS, cache_seqlens=3)
    short = {"rotary_cos": COS[:4], "rotary_sin": SIN[:4], "cache_seqlens": 3}
    for causal in (True, False):
        with pytest.raises(ArgumentError, match="`rotary_cos`"):
            flash_attn_with_kvcache(q, k_cache, v_cache, new, new, causal=causal, **short)
