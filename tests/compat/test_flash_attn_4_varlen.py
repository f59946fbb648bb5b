"""Layouts that FlashAttention-4's function for packed sequences takes: packed, dense, and pages for the keys."""

from typing import Any

import pytest
import torch
from flash_formula import assert_gradients_agree, assert_same, formula, leaves, randn

from flashtile.compat import flash_attn_3, flash_attn_4
from flashtile.errors import ArgumentError

B, SQ, SK, HQ, HKV, D = 2, 5, 7, 4, 2, 6
Q, K, V = randn(B, SQ, HQ, D), randn(B, SK, HKV, D, seed=1), randn(B, SK, HKV, D, seed=2)


def minus(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf)


def test_pages_of_version_4() -> None:
    pages = torch.stack((K[0, :6], V[0, :6])).unflatten(1, (3, 2))  # three pages of two keys
    table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32)
    used = torch.tensor([3, 2], dtype=torch.int32)
    cu_q = torch.tensor([0, 2, 5], dtype=torch.int32)
    out, _ = flash_attn_4.flash_attn_varlen_func(Q[0], *pages, cu_seqlens_q=cu_q, seqused_k=used, page_table=table)
    for rows, keys in ((slice(0, 2), [4, 5, 0]), (slice(2, 5), [2, 3])):
        assert_same((out[rows], formula(Q[:1, rows], K[:1, keys], V[:1, keys])[0][0]))


@pytest.mark.parametrize("keys", ["dense", "packed", "pages"])
def test_dense_queries_of_version_4(keys: str) -> None:
    """`[B, Sq, Hq, D]` in the function for packed sequences, with each layout of the keys, and with lengths in use."""
    used_q, used_k = torch.tensor([3, 5], dtype=torch.int32), torch.tensor([6, 4], dtype=torch.int32)
    more: dict[str, Any] = {"seqused_q": used_q, "causal": True, "return_lse": True}
    if keys == "packed":
        k, v = K[:, :6].flatten(0, 1), V[:, :6].flatten(0, 1)
        used_k, more["cu_seqlens_k"] = torch.tensor([6, 6]), torch.tensor([0, 6, 12], dtype=torch.int32)
    elif keys == "pages":
        k, v = (x[:, :6].unflatten(1, (2, 3)).flatten(0, 1) for x in (K, V))
        used_k, more["page_table"] = torch.tensor([6, 6]), torch.arange(4, dtype=torch.int32).view(2, 2)
    else:
        k, v, more["seqused_k"] = K, V, used_k
    mine: Any = leaves(Q, k, v)
    out, lse = flash_attn_4.flash_attn_varlen_func(*mine, **more)
    assert (out.shape, lse.shape) == (Q.shape, (B, HQ, SQ))
    for b, (rows, n) in enumerate(zip(used_q.tolist(), used_k.tolist(), strict=True)):
        reference, reference_lse, _ = formula(Q[b : b + 1, :rows], K[b : b + 1, :n], V[b : b + 1, :n], causal=True)
        assert_same((out[b, :rows], reference[0]), (lse[b, :, :rows], minus(reference_lse)[0]))
        assert not out[b, rows:].any()
    assert all(x.abs().sum() > 0 for x in torch.autograd.grad(out.sum(), mine))


def test_all_dense_in_the_packed_function_of_version_4() -> None:
    mine: Any = leaves(Q, K, V)
    out, lse = flash_attn_4.flash_attn_varlen_func(*mine, causal=True, return_lse=True)
    theirs: Any = leaves(Q, K, V)
    assert_gradients_agree((out, mine), (formula(*theirs, causal=True)[0], theirs))
    assert_same((lse, flash_attn_4.flash_attn_func(Q, K, V, causal=True, return_lse=True)[1]))


def test_shapes_that_do_not_fit() -> None:
    given: Any
    for given, name in ((Q[0], K, V), "q"), ((Q, K[0], V[0]), "k"), ((Q, K, V[:, 1:]), "v"):
        with pytest.raises(ArgumentError, match=f"`{name}`"):
            flash_attn_4.flash_attn_varlen_func(*given)


@pytest.mark.parametrize("given", [False, True], ids=["new", "given"])
def test_combine_of_packed_parts(given: bool) -> None:
    """As that of version 3 with one sequence; `lse` can be left out."""
    parts, lses = torch.randn(3, SQ, HQ, D), torch.randn(3, SQ, HQ)
    out = torch.empty(SQ, HQ, D) if given else None
    result, lse = flash_attn_4.flash_attn_combine(parts, lses, out)
    assert lse is not None
    reference, reference_lse = flash_attn_3.flash_attn_combine(parts[:, None], lses[:, None])
    assert torch.equal(result, reference[0])
    assert torch.equal(lse, reference_lse[0])
    assert result is out or not given
    dense, absent = flash_attn_4.flash_attn_combine(parts[:, None], lses[:, None], return_lse=False)
    assert absent is None
    assert torch.equal(dense, reference)
    with pytest.raises(ArgumentError, match="`seqused`"):
        flash_attn_4.flash_attn_combine(parts, lses, seqused=torch.ones(1))
    assert flash_attn_4.get_scheduler_metadata(5, 7, HQ, HKV, D, 1) is None
