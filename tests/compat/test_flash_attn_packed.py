"""`flash_attn_varlen_func` and its packed forms: every sequence is a dense call."""

import itertools
from typing import Any

import pytest
import torch
from flash_formula import assert_gradients_agree, assert_same, formula, leaves, randn
from torch import Tensor

from flashtile.compat import flash_attn_3, flash_attn_4
from flashtile.compat.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashtile.errors import ArgumentError

HQ, HKV, D = 4, 2, 6
CU_Q = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
CU_K = torch.tensor([0, 5, 7, 9], dtype=torch.int32)


def packed_formula(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, masks: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Tensor]:
    """A loop of dense calls."""
    outs, lses = [], []
    bounds = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    for n, ((q0, q1), (k0, k1)) in enumerate(bounds):
        keep = None if masks is None else (masks[n, :, : q1 - q0, : k1 - k0] >= 0).double() / 0.75
        out, lse, _ = formula(q[None, q0:q1], k[None, k0:k1], v[None, k0:k1], keep=keep, **settings)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
@pytest.mark.parametrize("settings", [{}, {"causal": True, "softcap": 2.0}, {"window_size": (1, 1)}], ids=str)
def test_results_and_gradients(settings: dict[str, Any], dropout_p: float) -> None:
    tensors = randn(8, HQ, D), randn(9, HKV, D, seed=1), randn(9, HKV, D, seed=2)
    mine, theirs = leaves(*tensors), leaves(*tensors)
    out, lse, mask = flash_attn_varlen_func(*mine, CU_Q, CU_K, 5, 5, dropout_p, **settings, return_attn_probs=True)
    assert mask.shape == ((3, HQ, 5, 5) if dropout_p else (0,))
    reference, reference_lse = packed_formula(*theirs, CU_Q, CU_K, mask if dropout_p else None, **settings)
    assert_same((lse, reference_lse))
    assert_gradients_agree((out, mine), (reference, theirs))


def test_longest_sequence_as_a_tensor() -> None:
    """`lengths.max()` without `.item()`, as transformers passes it."""
    x = randn(8, HKV, D)
    q, longest = x.repeat(1, 2, 1), CU_Q.diff().max()
    for function in (flash_attn_varlen_func, flash_attn_3.flash_attn_varlen_func, flash_attn_4.flash_attn_varlen_func):
        arguments = {"cu_seqlens_q": CU_Q, "cu_seqlens_k": CU_Q}
        out, expected = (
            function(q, x, x, **arguments, max_seqlen_q=n, max_seqlen_k=n, causal=True) for n in (longest, 5)
        )
        out, expected = (x[0] if isinstance(x, tuple) else x for x in (out, expected))
        assert torch.equal(out, expected)


def test_weights_of_sequences() -> None:
    """S_dmask of a packed call has each sequence in its own place, and 0 elsewhere."""
    q, k = randn(8, HQ, D), randn(9, HKV, D, seed=1)
    mask = flash_attn_varlen_func(q, k, k, CU_Q, CU_K, 6, 7, 0.5, return_attn_probs=True)[2]
    assert mask.shape == (3, HQ, 6, 7)
    weights = formula(q[None, 3:8], k[None, 7:9], k[None, 7:9])[2]
    assert_same((mask[2, :, :5, :2].abs(), weights[0]))
    assert not mask[1].any()
    assert not mask[2, :, 5:].any()
    assert not mask[2, :, :, 2:].any()


def test_packed_tensors() -> None:
    qkv, kv, q = randn(8, 3, HQ, D), randn(9, 2, HKV, D, seed=1), randn(8, HQ, D)
    mine, theirs = leaves(qkv), leaves(qkv)
    out = flash_attn_varlen_qkvpacked_func(*mine, CU_Q, 5, causal=True)
    reference = packed_formula(*theirs[0].unbind(1), CU_Q, CU_Q, causal=True)[0]
    assert_gradients_agree((out, mine), (reference, theirs))
    mine, theirs = leaves(q, kv), leaves(q, kv)
    out = flash_attn_varlen_kvpacked_func(*mine, CU_Q, CU_K, 5, 5, causal=True)
    reference = packed_formula(theirs[0], *theirs[1].unbind(1), CU_Q, CU_K, causal=True)[0]
    assert_gradients_agree((out, mine), (reference, theirs))


def test_pages() -> None:
    """Keys in pages of 2, where cu_seqlens_k has their numbers."""
    q, k, v = randn(8, HQ, D), randn(9, HKV, D, seed=1), randn(9, HKV, D, seed=2)
    table = torch.tensor([[4, 0, 6], [3, 9, 9], [1, 9, 9]], dtype=torch.int32)
    pages = [torch.full((7, 2, HKV, D), torch.nan, dtype=torch.float64) for _ in range(2)]
    for b, (start, end) in enumerate(itertools.pairwise(CU_K.tolist())):
        for n in range(end - start):
            for page, x in zip(pages, (k, v), strict=True):
                page[table[b, n // 2], n % 2] = x[start + n]
    out = flash_attn_varlen_func(q, *pages, CU_Q, CU_K, 5, 5, causal=True, block_table=table)
    assert_same((out, packed_formula(q, k, v, CU_Q, CU_K, causal=True)[0]))
    with pytest.raises(ArgumentError, match="`return_attn_probs`"):
        flash_attn_varlen_func(q, *pages, CU_Q, CU_K, 5, 5, 0.1, return_attn_probs=True, block_table=table)


def test_packed_forms_have_no_pages() -> None:
    """As in the original, by name and by position."""
    qkv = randn(8, 3, HQ, D)
    with pytest.raises(TypeError, match="block_table"):
        flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], CU_Q, CU_Q, 5, 5, block_table=None)
    with pytest.raises(TypeError, match="positional"):
        flash_attn_varlen_qkvpacked_func(qkv, CU_Q, 5, 0.0, None, False, (-1, -1), 0.0, None, False, False, None)
