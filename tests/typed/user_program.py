"""A user's program that type checkers accept, and lines that they have to refuse: those with `type: ignore`.

pyright and mypy read it (`make types`), with ignores that nothing needs as errors; `tests/api/test_typed.py` runs it.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from typing import assert_type

import torch
from torch import Tensor

import flashtile
from flashtile.compat.flash_attn import flash_attn_func, flash_attn_with_kvcache


def shapes(with_lse: bool) -> list[torch.Size]:
    """`return_lse` decides the type of a result."""
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    out = flashtile.attention(q, k, v, causal="top_left", window=(3, None), scale=0.5)
    assert_type(out, Tensor)
    assert_type(flashtile.attention(q, k, v, return_lse=False), Tensor)
    out, lse = flashtile.attention(q, k, v, return_lse=True, score_mod=lambda score, b, h, q_idx, k_idx: 2 * score)
    assert_type(lse, Tensor)
    out = flashtile.attention(q, k, v, mask=lambda b, h, q_idx, k_idx: k_idx <= q_idx + 3)
    out = flashtile.attention(
        q, k, v, mask=flashtile.mask_mods.or_masks(flashtile.mask_mods.causal(3), lambda *x: x[2] < 1)
    )
    either = flashtile.attention(q, k, v, return_lse=with_lse)
    assert_type(either, Tensor | tuple[Tensor, Tensor])
    merged, _ = flashtile.merge_attention([out, out], [lse, lse])
    return [flashtile.attention(q, k, v).shape, merged.shape]


def packed() -> tuple[torch.Size, Tensor]:
    q, k, v = (torch.randn(5, 2, 8) for _ in range(3))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    _, lse = flashtile.attention_varlen(q, k, v, cu, cu, max_seqlen_q=3, return_lse=True)
    return flashtile.attention_varlen(q, k, v, cu, cu, seqused_k=None, causal=True).shape, lse


def cached() -> tuple[torch.Size, Tensor]:
    q, k_cache, v_cache = (torch.randn(1, 2, 4, 8) for _ in range(3))
    lengths = torch.tensor([4], dtype=torch.int32)
    _, lse = flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, return_lse=True)
    return flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, num_splits=2).shape, lse


def named_as_elsewhere() -> list[torch.Size]:
    """Results of other libraries' names are untyped where a flag decides what they are."""
    q, k, v = (torch.randn(1, 4, 2, 8) for _ in range(3))
    with_lse = flash_attn_with_kvcache(q, k, v, return_softmax_lse=True)
    return [(flash_attn_func(q, k, v) + 1).shape, flash_attn_with_kvcache(q, k, v).shape, with_lse[1].shape]


def refused(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Never called: a type checker refuses every line."""
    flashtile.attention(q, k, v, is_causal=True)  # type: ignore[call-overload]
    flashtile.attention(q, k, v, q)  # type: ignore[call-overload]
    flashtile.attention(q, k, v, causal="bottom_right")  # type: ignore[call-overload]
    print(flashtile.attention(q, k, v, return_lse=True).shape)  # type: ignore[attr-defined]
    flashtile.attention_varlen(q, k, v)  # type: ignore[call-overload]
    flashtile.attention_with_kvcache(q, k, v)  # type: ignore[call-overload]
