"""Host time that other libraries' names add to a call: `python benchmarks/compat_host.py`.

flashtile's functions are replaced by one that returns q at once. Each name is compared with that function and the same
views of the tensors; both take turns, and the fastest of the rounds counts.
"""

import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashtile.compat.torch as compat_torch
from flashtile.compat import flash_attn, flash_attn_3, flash_attn_4
from flashtile.compat.torch import flex, sdpa, varlen

ROUNDS, CALLS = 200, 200
PUBLIC = ("attention", "attention_varlen", "attention_with_kvcache")
Q, K, QKV, LSE = torch.randn(1, 8, 2, 16), torch.randn(1, 8, 2, 16), torch.randn(1, 8, 3, 2, 16), torch.zeros(1)
X, CU = Q[0], torch.tensor([0, 8], dtype=torch.int32)
MASK = torch.ones(8, 8, dtype=torch.bool)
LENGTHS = torch.tensor([5], dtype=torch.int32)


def nothing(q: Tensor, *others: Any, return_lse: bool = False, **keywords: Any) -> Any:
    return (q, LSE) if return_lse else q


def views(q: Tensor = Q, k: Tensor = K, v: Tensor = K) -> Tensor:
    return nothing(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True).transpose(1, 2)


def plain() -> Tensor:
    return nothing(X, X, X, causal=True)


Run = Callable[[], Any]
CASES: dict[str, tuple[Run, Run]] = {
    "flash_attn_func": (lambda: flash_attn.flash_attn_func(Q, K, K, causal=True), views),
    "flash_attn_func with a window": (lambda: flash_attn.flash_attn_func(Q, K, K, window_size=(4, 0)), views),
    "flash_attn_qkvpacked_func": (lambda: flash_attn.flash_attn_qkvpacked_func(QKV), lambda: views(*QKV.unbind(2))),
    "flash_attn_varlen_func": (lambda: flash_attn.flash_attn_varlen_func(X, X, X, CU, CU, 8, 8), plain),
    "flash_attn_with_kvcache": (lambda: flash_attn.flash_attn_with_kvcache(Q, K, K, cache_seqlens=LENGTHS), views),
    "flash_attn_func of -3": (lambda: flash_attn_3.flash_attn_func(Q, K, K, causal=True), views),
    "flash_attn_varlen_func of -3": (lambda: flash_attn_3.flash_attn_varlen_func(X, X, X, CU, CU, 8, 8), plain),
    "flash_attn_with_kvcache of -3": (
        lambda: flash_attn_3.flash_attn_with_kvcache(Q, K, K, cache_seqlens=LENGTHS),
        views,
    ),
    "flash_attn_func of -4": (lambda: flash_attn_4.flash_attn_func(Q, K, K, causal=True), views),
    "flash_attn_varlen_func of -4": (
        lambda: flash_attn_4.flash_attn_varlen_func(X, X, X, cu_seqlens_q=CU, cu_seqlens_k=CU),
        plain,
    ),
    "scaled_dot_product_attention": (lambda: compat_torch.scaled_dot_product_attention(Q, K, K), plain),
    "scaled_dot_product_attention with a mask": (
        lambda: compat_torch.scaled_dot_product_attention(Q, K, K, attn_mask=MASK),
        lambda: nothing(X, X, X, mask=MASK[None, None]),
    ),
    "flex_attention": (lambda: compat_torch.flex_attention(Q, K, K), plain),
    "varlen_attn": (lambda: compat_torch.varlen_attn(X, X, X, CU, CU, 8, 8), plain),
}


def main() -> None:
    of_flash_attn = (flash_attn.dense, flash_attn.packed, flash_attn.kvcache, flash_attn_3, flash_attn_4)
    for module in (*of_flash_attn, flex, sdpa, varlen):
        for name in PUBLIC:
            if hasattr(module, name):
                setattr(module, name, nothing)
    for name, runs in CASES.items():
        timers = [timeit.Timer(run) for run in runs]
        rounds = [[timer.timeit(CALLS) / CALLS * 1e6 for timer in timers] for _ in range(ROUNDS)]
        facade, direct = (min(times) for times in zip(*rounds, strict=True))
        print(f"{name}: {facade:.2f} us, its views and a call {direct:.2f} us, which is {facade - direct:.2f} us more")


if __name__ == "__main__":
    with torch.no_grad():
        main()
