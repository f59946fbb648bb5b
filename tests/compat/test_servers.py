"""The names of servers, vLLM's and SGLang's: pages, sinks, results in a given tensor, versions."""

from typing import Any

import pytest
import torch
from flash_formula import assert_same, formula, randn

from flashtile.compat import sgl_flash_attn, vllm_flash_attn
from flashtile.errors import ArgumentError

HQ, HKV, D, PAGE = 4, 2, 8, 3
CU = torch.tensor([0, 2, 5], dtype=torch.int32)
USED = torch.tensor([7, 4], dtype=torch.int32)
TABLE = torch.tensor([[4, 0, 2], [1, 3, 5]], dtype=torch.int32)
Q, SINKS = randn(5, HQ, D), randn(HQ)
PAGES = randn(6, PAGE, HKV, D, seed=1), randn(6, PAGE, HKV, D, seed=2)


def expected(**settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`out [Tq, Hq, D]` and `lse [Hq, Tq]`, +inf for rows that see no key."""
    outs, lses = [], []
    for b in range(2):
        k, v = (x[TABLE[b].long()].flatten(0, 1)[None, : int(USED[b])] for x in PAGES)
        out, lse, _ = formula(Q[None, CU[b] : CU[b + 1]], k, v, **settings)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


@pytest.mark.parametrize("version", [2, 3, 4])
def test_pages_of_vllm(version: int) -> None:
    out = torch.empty_like(Q)
    result, lse = vllm_flash_attn.flash_attn_varlen_func(
        Q, *PAGES, 3, CU, 9, seqused_k=USED, block_table=TABLE, causal=True, window_size=[4, 0], softcap=2.0,
        s_aux=SINKS, out=out, return_softmax_lse=True, fa_version=version, num_splits=2,
        scheduler_metadata=vllm_flash_attn.get_scheduler_metadata(2, 3, 9, HQ, HKV, D, USED),
    )  # fmt: skip
    assert result is out
    reference, reference_lse = expected(causal=True, window_size=(4, 0), softcap=2.0, sinks=SINKS)
    assert_same((out, reference), (lse, reference_lse))


@pytest.mark.parametrize(("version", "empty"), [(2, torch.inf), (3, -torch.inf)])
def test_packed_keys_of_vllm(version: int, empty: float) -> None:
    """More queries than keys: the lse of a row that sees none is that of the version."""
    k, v, cu = PAGES[0][0], PAGES[1][0], torch.tensor([0, 1, 3], dtype=torch.int32)
    arguments = (Q, k, v, 3, CU, 2, cu)
    out, lse = vllm_flash_attn.flash_attn_varlen_func(
        *arguments, causal=True, return_softmax_lse=True, fa_version=version
    )
    assert (lse[:, [0, 2]] == empty).all()
    assert torch.equal(vllm_flash_attn.flash_attn_varlen_func(*arguments, causal=True), out)
    assert_same((out[3:], formula(Q[None, 3:], k[None, 1:], v[None, 1:], causal=True)[0][0]))


@pytest.mark.parametrize("version", [3, 4])
def test_cache_of_sglang(version: int) -> None:
    """Packed queries over pages; `cu_seqlens_k_new` is that of the cache, with nothing to append."""
    out = torch.empty_like(Q)
    result, lse, *rest = sgl_flash_attn.flash_attn_with_kvcache(
        Q, *PAGES, page_table=TABLE, cache_seqlens=USED, cu_seqlens_q=CU, cu_seqlens_k_new=torch.tensor([0, 7, 11]),
        max_seqlen_q=3, causal=True, sinks=SINKS, ver=version, out=out, return_softmax_lse=True,
    )  # fmt: skip
    assert result is out
    assert [x.numel() for x in rest] == [0, 0]
    assert_same(*zip((out, lse), expected(causal=True, sinks=SINKS), strict=True))
    other = sgl_flash_attn.flash_attn_varlen_func(
        Q, *PAGES, CU, None, 3, 9, seqused_k=USED, page_table=TABLE, causal=True, sinks=SINKS, ver=version
    )
    assert_same((other, out))


def test_dense_queries_into_a_given_tensor() -> None:
    q, out = randn(2, 3, HQ, D), torch.zeros(2, 3, HQ, D, dtype=torch.float64)
    k, v = (x.unflatten(0, (2, 3)).flatten(1, 2) for x in PAGES)
    result = sgl_flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), cache_seqlens=9, sinks=SINKS, out=out)
    assert result is out
    assert_same((out, formula(q, k, v, sinks=SINKS)[0]))


@pytest.mark.parametrize(
    ("call", "change", "name"),
    [
        ("vllm", {"q_v": Q[:1]}, "qv"),
        ("vllm", {"k_descale": Q}, "k_descale"),
        ("vllm", {"cp_world_size": 2}, "cp_world_size"),
        ("vllm", {"fa_version": 5}, "fa_version"),
        ("vllm", {"out": Q[:1]}, "out"),
        ("sglang", {"qv": Q[:1]}, "qv"),
        ("sglang", {"score_mod": max}, "score_mod"),
        ("sglang", {"ver": 2}, "ver"),
        ("sglang", {"only_qv": True}, "only_qv"),
    ],
)
def test_what_is_refused(call: str, change: dict[str, Any], name: str) -> None:
    of_cache = {"cache_seqlens": USED, "page_table": TABLE, "cu_seqlens_q": CU, "max_seqlen_q": 3}
    function, arguments = sgl_flash_attn.flash_attn_with_kvcache, (Q, *PAGES)
    if call == "vllm":
        function, arguments = vllm_flash_attn.flash_attn_varlen_func, (Q, *PAGES, 3, CU, 9)
        of_cache = {"seqused_k": USED, "block_table": TABLE}
    with pytest.raises(ArgumentError, match=f"`{name}`"):
        function(*arguments, **of_cache, **change)


def test_versions_of_vllm() -> None:
    assert [vllm_flash_attn.is_fa_version_supported(n) for n in (1, 2, 3, 4)] == [False, True, True, True]
    assert vllm_flash_attn.fa_version_unsupported_reason(3) is None
    assert "not 1" in str(vllm_flash_attn.fa_version_unsupported_reason(1))
