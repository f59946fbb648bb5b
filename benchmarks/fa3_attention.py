"""FlashAttention-3's operators as an attention function of transformers, for calls without a mask.

transformers' own "flash_attention_3" needs the package `flash_attn_interface`; this one also takes a library file.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from flashtile.bench.providers.flash_attn_3 import FlashAttention3

NAME = "fa3"


class Attention(torch.autograd.Function):
    """Attention of `[B, S, H, D]`, aligned to the last query and key."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=0)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.keywords = {"softmax_scale": scale, "is_causal": causal}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        q, k, v, out, lse = ctx.saved_tensors
        found = [torch.empty_like(x) for x in (q, k, v)]
        torch.ops.flash_attn_3.bwd(dout.contiguous(), q, k, v, out, lse, *found, **ctx.keywords)
        return *found, None, None


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """`[B, H, S, D]`; every query sees the keys up to its own position, of which the last is the last query's."""
    assert attention_mask is None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return Attention.apply(q, k, v, scale, q.shape[1] > 1), None  # pyright: ignore[reportReturnType]


def no_mask(*positional: Any, **keywords: Any) -> None:
    """The mask function: calls are causal, and have no padding."""


def register(library: Path) -> str:
    """Load FlashAttention-3's operators and register them; return the name for `set_attn_implementation`."""
    reason = FlashAttention3(library).unusable(torch.device("cuda"))
    if reason is not None:
        raise SystemExit(reason)
    FlashAttention3(library).operators()
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, no_mask)
    return NAME
