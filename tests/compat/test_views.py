"""No copy of q, k or v is made: what reaches flashtile has the memory of the arguments."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import flashtile
import flashtile.compat.torch as compat_torch
from flashtile.compat import cache, flash_attn, flash_attn_3, flash_attn_4

PUBLIC = ("attention", "attention_varlen", "attention_with_kvcache")
CU = torch.tensor([0, 5, 8], dtype=torch.int32)
Q, K, V = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16), torch.randn(2, 8, 2, 16)
K1, V1 = torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
QKV, KV = torch.randn(2, 8, 3, 4, 16), torch.randn(2, 8, 2, 4, 16)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]] = {
    "dense": (flash_attn.flash_attn_func, (Q, K, V), {"causal": True}),
    "qkvpacked": (flash_attn.flash_attn_qkvpacked_func, (QKV,), {}),
    "kvpacked": (flash_attn.flash_attn_kvpacked_func, (Q, KV), {}),
    "varlen": (
        flash_attn.flash_attn_varlen_func,
        (Q[0], K[0], V[0]),
        {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 5, "max_seqlen_k": 5},
    ),
    "varlen_qkvpacked": (flash_attn.flash_attn_varlen_qkvpacked_func, (QKV[0],), {"cu_seqlens": CU, "max_seqlen": 5}),
    "kvcache": (flash_attn.flash_attn_with_kvcache, (Q[:, :1], K, V, K1, V1), {"cache_seqlens": 3}),
    "fa3": (flash_attn_3.flash_attn_func, (Q, K, V), {}),
    "fa3 kvcache": (flash_attn_3.flash_attn_with_kvcache, (Q[:, :1], K, V), {"cache_seqlens": 3}),
    "fa4": (flash_attn_4.flash_attn_func, (Q, K, V), {}),
    "sdpa": (compat_torch.scaled_dot_product_attention, (Q, K, V), {}),
    "sdpa of 5 dimensions": (compat_torch.scaled_dot_product_attention, (QKV, QKV, QKV), {"is_causal": True}),
    "sdpa of 3 dimensions": (compat_torch.scaled_dot_product_attention, (Q[0], Q[0], Q[0]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_copies(name: str) -> None:
    function, tensors, keywords = CALLS[name]
    storages = {x.untyped_storage().data_ptr() for x in tensors}
    seen: list[Tensor] = []

    def spy(public: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen.extend(x for x in (*arguments, *options.values()) if isinstance(x, Tensor) and x.is_floating_point())
            return public(*arguments, **options)

        return call

    with contextlib.ExitStack() as patches:
        for place in {function.__module__, cache.__name__, flash_attn.dense.__name__, flash_attn.packed.__name__}:
            if found := spies(place, spy):
                patches.enter_context(mock.patch.multiple(sys.modules[place], **found))
        out = function(*tensors, **keywords)
    assert len(seen) >= 3
    assert {x.untyped_storage().data_ptr() for x in seen} == storages
    assert out is not None


def spies(module: str, spy: Callable[..., Any]) -> dict[str, Any]:
    held = vars(sys.modules[module])
    return {name: spy(getattr(flashtile, name)) for name in PUBLIC if name in held}


def test_results_have_the_layout_of_queries() -> None:
    """`[B, S, H * D]` is a view of the output."""
    assert flash_attn.flash_attn_func(Q, K, V).is_contiguous()
    assert flash_attn.flash_attn_qkvpacked_func(QKV).is_contiguous()
