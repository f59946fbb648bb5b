"""FlashAttention-2's functions for sequences of one length, `[B, S, H, D]`, by views in flashtile's layout."""

from typing import Any

from torch import Tensor

from ...api.attention import attention
from ...api.signatures import options_of
from ..arguments import WindowSize, infinite_lse, keywords, window_of
from .probabilities import dense_probabilities, new_seed

Outputs = Any  # a tensor, or `(out, softmax_lse, S_dmask)`; untyped, as in flash_attn, so that checkers take `out + 1`
EXAMPLE = "flash_attn_func(q, k, v, causal=True, window_size=(127, 0))"


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Outputs:
    """Attention over `[B, S, H, D]` with FlashAttention-2's arguments. Tensors are viewed, never copied.

    Args:
        q: queries `[B, Sq, Hq, D]`, on any device, of every dtype and head dimension of `flashtile.attention`.
        k: keys `[B, Sk, Hkv, D]`; Hq is a multiple of Hkv.
        v: values `[B, Sk, Hkv, Dv]`.
        dropout_p: probability of dropping a weight, `0 <= p < 1`.
        softmax_scale: factor of the products; `D ** -0.5` if `None`.
        causal: key j is visible iff `j <= i + Sk - Sq`.
        window_size: `(left, right)`: iff `i + Sk - Sq - left <= j <= i + Sk - Sq + right`. Negative is unlimited.
        softcap: scores become `softcap * tanh(score / softcap)` if it is above 0.
        alibi_slopes: `[Hq]` or `[B, Hq]`, float32 or q's dtype; `slope * |i + Sk - Sq - j|` is subtracted.
        deterministic: the same bits for the same call; `False` follows `torch.use_deterministic_algorithms`.
        return_attn_probs: also return lse and S_dmask.

    Returns:
        `out [B, Sq, Hq, Dv]` in q's dtype; with `return_attn_probs` `(out, softmax_lse, S_dmask)`. `softmax_lse
        [B, Hq, Sq]` is float32 (float64 for float64), natural logarithm, +inf for rows that see no key. `S_dmask [B,
        Hq, Sq, Sk]` has the weights before dropout, negative where they were dropped; it takes memory in proportion to
        `Sq * Sk`. Without dropout it is empty.

    Raises:
        ArgumentError: an argument is not what it should be; shapes in the message are as `flashtile.attention` has
            them.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    window = window_of(window_size, EXAMPLE)
    settings = keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    if return_attn_probs:
        return with_probabilities(q, k, v, settings)
    return attention(q, k, v, **settings).transpose(1, 2)


@options_of(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **keywords: Any) -> Outputs:
    """Attention as by `flash_attn_func`, of keys and values in one tensor, `kv [B, Sk, 2, Hkv, D]`."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *options, **keywords)


@options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, **keywords: Any) -> Outputs:
    """Attention as by `flash_attn_func`, of queries, keys and values in one tensor, `qkv [B, S, 3, H, D]`."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *options, **keywords)


def with_probabilities(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `(out, softmax_lse, S_dmask)` of q, k and v in flashtile's layout."""
    if settings["dropout_p"] > 0:
        settings["dropout_seed"] = new_seed(q)
    out, lse = attention(q, k, v, **settings, return_lse=True)
    probabilities = dense_probabilities(q, k, settings) if settings["dropout_p"] > 0 else q.new_empty(0)
    return out.transpose(1, 2), infinite_lse(lse), probabilities
