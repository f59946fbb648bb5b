"""FlashAttention-3's and -4's names: results, what they return, and what they decline."""

from typing import Any

import pytest
import torch
from flash_formula import assert_gradients_agree, assert_same, formula, leaves, randn, rotated

from flashtile.compat import flash_attn_3, flash_attn_4
from flashtile.errors import ArgumentError

B, SQ, SK, HQ, HKV, D = 2, 5, 7, 4, 2, 6
CU = torch.tensor([0, 2, 7], dtype=torch.int32)
Q, K, V = randn(B, SQ, HQ, D), randn(B, SK, HKV, D, seed=1), randn(B, SK, HKV, D, seed=2)


def minus(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == torch.inf, -torch.inf)


@pytest.mark.parametrize("version", [3, 4])
def test_dense(version: int) -> None:
    """More queries than keys: the first rows see nothing, with lse -inf."""
    mine, theirs = leaves(K, Q[:, :, :HKV], V[:, :SQ]), leaves(K, Q[:, :, :HKV], V[:, :SQ])
    settings: dict[str, Any] = {"causal": True, "softcap": 1.5}
    if version == 3:
        out, lse = flash_attn_3.flash_attn_func(*mine, 0.4, window_size=(2, -1), return_attn_probs=True, **settings)
        assert torch.equal(flash_attn_3.flash_attn_func(*mine, 0.4, window_size=(2, -1), **settings), out)
    else:
        out, lse = flash_attn_4.flash_attn_func(
            *mine, softmax_scale=0.4, window_size=(2, None), return_lse=True, **settings
        )
    reference, reference_lse, _ = formula(*theirs, scale=0.4, window_size=(2, -1), **settings)
    assert_same((lse, minus(reference_lse)))
    assert (lse == -torch.inf).any()
    assert_gradients_agree((out, mine), (reference, theirs))


@pytest.mark.parametrize("heads", [None, HQ])
def test_qkvpacked_of_version_3(heads: int | None) -> None:
    qkv = randn(B, SK, 3, HQ, D) if heads is None else randn(B, SK, HQ + 2 * HKV, D)
    parts = qkv.unbind(2) if heads is None else qkv.split((HQ, HKV, HKV), dim=2)
    out = flash_attn_3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=heads)
    assert_same((out, formula(*parts, causal=True)[0]))
    if heads is not None:
        with pytest.raises(ArgumentError, match="`num_heads_q`"):
            flash_attn_3.flash_attn_qkvpacked_func(qkv)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_combine_of_version_3(dtype: torch.dtype | None) -> None:
    """Parts of the keys: causal, so that late parts have no key for early rows, and row 0 has none at all. The original
    reads no output of such rows.
    """
    q, k, v = (x.float() for x in (Q[:, :, :HKV], K, V))
    visible = torch.arange(SK) < torch.arange(SQ)[:, None]

    def softmax(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        s = torch.einsum("bihd,bjhd->bihj", q.double(), k.double()[:, keys])
        s = s.masked_fill(~visible[:, None, keys], -torch.inf)
        out = torch.einsum("bihj,bjhd->bihd", s.softmax(-1), v.double()[:, keys])  # NaN without keys
        return out, s.logsumexp(-1)

    parts = [softmax(slice(first, first + 2)) for first in range(0, SK, 2)]
    out_partial, lse_partial = (torch.stack(x).float() for x in zip(*parts, strict=True))
    out, lse = flash_attn_3.flash_attn_combine(out_partial, lse_partial, out_dtype=dtype)
    reference, reference_lse = softmax(slice(None))
    reference[:, 0] = 0
    assert (reference_lse == -torch.inf).any()
    assert out.dtype is (dtype or torch.float32)
    tolerance = 1e-6 if dtype is None else 4e-3
    torch.testing.assert_close(out.double(), reference, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), reference_lse, atol=1e-6, rtol=1e-6)
    assert out.is_contiguous()
    assert lse.transpose(1, 2).is_contiguous()
    given = torch.empty_like(out)
    assert flash_attn_3.flash_attn_combine(out_partial, lse_partial, given, dtype)[0] is given
    assert torch.equal(given, out)


def test_what_combine_refuses() -> None:
    out, lse = torch.randn(3, B, SQ, HQ, D), torch.randn(3, B, SQ, HQ)
    for arguments, name in (
        ((out[0], lse), "out_partial"), ((out[:0], lse[:0]), "out_partial"), ((out, lse.mT), "lse_partial"),
        ((out, lse, out[0].double()), "out"), ((out, lse, out[0], torch.float16), "out"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"`{name}`"):
            flash_attn_3.flash_attn_combine(*arguments)


def test_sinks_of_version_4() -> None:
    mine, theirs = leaves(Q, K, V, randn(HQ)), leaves(Q, K, V, randn(HQ))
    out, lse = flash_attn_4.flash_attn_func(*mine[:3], learnable_sink=mine[3])
    assert lse is None
    assert_gradients_agree((out, mine), (formula(*theirs[:3], sinks=theirs[3])[0], theirs))


@pytest.mark.parametrize("version", [3, 4])
def test_packed(version: int) -> None:
    q, k, v, used = Q[0], K[0], V[0], torch.tensor([1, 4], dtype=torch.int32)
    cu_q = torch.tensor([0, 2, 5], dtype=torch.int32)
    if version == 3:
        out, lse = flash_attn_3.flash_attn_varlen_func(
            q, k, v, cu_q, CU, 3, 5, seqused_k=used, causal=True, return_attn_probs=True
        )
    else:
        out, lse = flash_attn_4.flash_attn_varlen_func(
            q, k, v, None, cu_q, CU, 3, 5, seqused_k=used, causal=True, return_lse=True
        )
    for rows, keys in ((slice(0, 2), slice(0, 1)), (slice(2, 5), slice(2, 6))):
        reference, reference_lse, _ = formula(q[None, rows], k[None, keys], v[None, keys], causal=True)
        assert_same((out[rows], reference[0]), (lse[:, rows], minus(reference_lse)[0]))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("starts", [None, torch.tensor([3, 0], dtype=torch.int32)], ids=["lengths", "starts"])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_cache_of_version_3(packed: bool, starts: torch.Tensor | None, causal: bool) -> None:
    """Appended and rotated keys, with dense and packed queries, at positions of the cache or of their own."""
    cos, sin = randn(16, 2).cos(), randn(16, 2).sin()
    lengths, cu = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    counts = (2, 3) if packed else (2, 2)
    q, k, v = randn(5, HQ, D), randn(5, HKV, D, seed=1), randn(5, HKV, D, seed=2)
    if not packed:
        q, k, v = (x[:4].unflatten(0, (2, 2)) for x in (q, k, v))
    caches = K.repeat(1, 2, 1, 1), V.repeat(1, 2, 1, 1)
    k_cache, v_cache = caches[0].clone(), caches[1].clone()
    more = {"cu_seqlens_q": cu, "cu_seqlens_k_new": cu, "max_seqlen_q": 3} if packed else {}
    out, lse, *rest = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos=cos, rotary_sin=sin, rotary_interleaved=False, rotary_seqlens=starts,
        cache_seqlens=lengths, causal=causal, return_softmax_lse=True, **more,
    )  # fmt: skip
    assert [x.numel() for x in rest] == [0, 0]
    for b, n in enumerate(counts):
        rows = slice(2 * b, 2 * b + n)
        row, k_new, v_new = ((x[rows] if packed else x[b])[None] for x in (q, k, v))
        length, first = int(lengths[b]), int((lengths if starts is None else starts)[b])
        positions = first + torch.arange(n)[None]
        row = rotated(row, cos, sin, positions if causal else torch.full_like(positions, first), False)
        k_new = rotated(k_new, cos, sin, positions, False)
        keys = torch.cat((caches[0][b : b + 1, :length], k_new), dim=1)
        values = torch.cat((caches[1][b : b + 1, :length], v_new), dim=1)
        reference, reference_lse, _ = formula(row, keys, values, causal=causal)
        assert_same((out[rows] if packed else out[b], reference[0]))
        assert_same((lse[:, rows] if packed else lse[b], reference_lse[0]), (k_cache[b, : length + n], keys[0]))


def test_chunks_and_splits_of_version_3() -> None:
    """Rows that see only their own chunk of positions; the first row is before all keys and sees none."""
    mine, theirs = leaves(K, Q[:, :, :HKV], V[:, :SQ]), leaves(K, Q[:, :, :HKV], V[:, :SQ])
    for causal in (False, True):
        out = flash_attn_3.flash_attn_func(*mine, causal=causal, attention_chunk=3, num_splits=2)
        assert_gradients_agree((out, mine), (formula(*theirs, causal=causal, chunk=3)[0], theirs))
    packed = (Q[0], K[0, :SQ], V[0, :SQ])
    cu = torch.tensor([0, 5], dtype=torch.int32)
    out = flash_attn_3.flash_attn_varlen_func(*packed, cu, cu, 5, 5, attention_chunk=2, num_splits=3)
    assert_same((out, formula(*(x[None] for x in packed), chunk=2)[0][0]))


@pytest.mark.parametrize("version", [3, 4])
def test_queries_that_are_in_use(version: int) -> None:
    """Rows past `seqused_q` are 0, and causal is aligned to the last row in use."""
    cu_q, used = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([2, 1], dtype=torch.int32)
    given = Q[0], K[0], V[0]
    if version == 3:
        out, lse = flash_attn_3.flash_attn_varlen_func(
            *given, cu_q, CU, 3, 5, seqused_q=used, causal=True, return_attn_probs=True
        )
    else:
        out, lse = flash_attn_4.flash_attn_varlen_func(
            *given, None, cu_q, CU, 3, 5, seqused_q=used, causal=True, return_lse=True
        )
    assert not out[3:].any()
    assert (lse[:, 3:] == -torch.inf).all()
    for rows, keys in ((slice(0, 2), slice(0, 2)), (slice(2, 3), slice(2, 7))):
        reference, reference_lse, _ = formula(Q[:1, rows], K[:1, keys], V[:1, keys], causal=True)
        assert_same((out[rows], reference[0]), (lse[:, rows], minus(reference_lse)[0]))


@pytest.mark.parametrize(
    ("window_size", "causal", "meant"),
    [
        ((-1, 3), False, (-1, 3)),
        ((5, -1), False, (5, -1)),
        ((None, -2), False, (99, -2)),
        ((-1, None), False, (-1, 99)),
        ((-3, 2), False, (99, 99)),
        ((-1, -1), True, (99, 0)),
        ((2, -2), True, (2, 0)),
        ((None, -2), True, (99, 0)),
    ],
)
def test_negative_windows_of_version_4(window_size: Any, causal: bool, meant: tuple[int, int]) -> None:
    """A sum below 0 is unlimited, and causal sets the right side."""
    mine, theirs = leaves(Q, K, V), leaves(Q, K, V)
    out, _ = flash_attn_4.flash_attn_func(*mine, window_size=window_size, causal=causal)
    assert_gradients_agree((out, mine), (formula(*theirs, window_size=meant, negative=True)[0], theirs))


@pytest.mark.parametrize("packed", [False, True], ids=["dense queries", "packed queries"])
def test_new_keys_packed_otherwise_than_queries(packed: bool) -> None:
    """`cu_seqlens_k_new`, and new keys of one length with packed queries."""
    lengths, cu_k = torch.tensor([4, 1], dtype=torch.int32), torch.tensor([0, 1, 4], dtype=torch.int32)
    cu_q = torch.tensor([0, 2, 4], dtype=torch.int32)
    k, v = randn(4, HKV, D, seed=1), randn(4, HKV, D, seed=2)
    q = Q[:, :2].flatten(0, 1) if packed else Q[:, :2]
    more = {"cu_seqlens_q": cu_q, "max_seqlen_q": 2} if packed else {}
    for cu in (cu_k, None) if packed else (cu_k,):
        k_cache, v_cache = K.clone(), V.clone()
        new = (k, v) if cu is not None else (k.unflatten(0, (2, 2)), v.unflatten(0, (2, 2)))
        out = flash_attn_3.flash_attn_with_kvcache(
            q, k_cache, v_cache, *new, cache_seqlens=lengths, cu_seqlens_k_new=cu, causal=True, **more
        )
        ends = (0, 1, 4) if cu is not None else (0, 2, 4)
        for b in range(2):
            length, part = int(lengths[b]), slice(ends[b], ends[b + 1])
            keys, values = torch.cat((K[b, :length], k[part])), torch.cat((V[b, :length], v[part]))
            reference = formula(Q[b : b + 1, :2], keys[None], values[None], causal=True)[0][0]
            assert_same((out[2 * b : 2 * b + 2] if packed else out[b], reference), (k_cache[b, : len(keys)], keys))


DECLINED = {
    "qv": Q, "q_descale": Q, "k_descale": Q, "v_descale": Q, "gather_kv_indices": CU, "score_mod": min,
    "score_mod_bwd": min, "mask_mod": min, "aux_tensors": [Q], "aux_scalars": (1,), "block_sparse_tensors": (Q,),
    "block_sparse_tensors_bwd": (Q,), "min_seqlen_k": 1,
}  # fmt: skip
IGNORED = {
    "pack_gqa": True, "sm_margin": 2, "scheduler_metadata": CU, "num_splits": -1, "seqlen_k_per_split": 64,
    "disable_scheduler_metadata": True,
}  # fmt: skip
PACKED = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5}
CALLS = [
    (flash_attn_3.flash_attn_func, {}),
    (flash_attn_3.flash_attn_varlen_func, PACKED),
    (flash_attn_3.flash_attn_with_kvcache, {"cache_seqlens": 3}),
    (flash_attn_4.flash_attn_func, {}),
    (flash_attn_4.flash_attn_varlen_func, PACKED),
]


@pytest.mark.parametrize(("function", "needed"), CALLS, ids=lambda x: getattr(x, "__module__", ""))
def test_what_has_no_equivalent_is_declined(function: Any, needed: dict[str, Any]) -> None:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    takes_qv = function.__module__.endswith("flash_attn_3")
    declined = [name for name in names if name in DECLINED and not (name == "qv" and takes_qv)]
    assert len(declined) >= 3
    for name in declined:
        with pytest.raises(ArgumentError, match=f"`{name}`") as caught:
            function(Q, K, V, **needed, **{name: DECLINED[name]})
        assert caught.value.argument == name
        assert "a call that works: flash_attn_" in str(caught.value)


@pytest.mark.parametrize(("function", "needed"), CALLS, ids=lambda x: getattr(x, "__module__", ""))
def test_settings_of_the_scheduler_change_nothing(function: Any, needed: dict[str, Any]) -> None:
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    ignored = {name: IGNORED[name] for name in names if name in IGNORED}
    assert len(ignored) >= 2
    given = (K[0], K[0], V[0]) if needed is PACKED else (Q, K, V)
    results = function(*given, **needed, **ignored), function(*given, **needed)
    out, reference = (x[0] if isinstance(x, tuple) else x for x in results)
    assert torch.equal(out, reference)


def test_other_errors() -> None:
    with pytest.raises(ArgumentError, match="`window_size`"):
        flash_attn_4.flash_attn_func(Q, K, V, window_size=(-3,))
    with pytest.raises(ArgumentError, match="`cu_seqlens_k_new`"):
        flash_attn_3.flash_attn_with_kvcache(
            Q[0], K, V, K[0].clone(), V[0].clone(), cache_seqlens=3, cu_seqlens_q=CU, cu_seqlens_k_new=CU + 1
        )
