"""FlashAttention-2's functions for packed sequences, `[T, H, D]`, which is flashtile's layout too."""

from typing import Any

from torch import Tensor

from ...api.signatures import options_of
from ...api.varlen import attention_varlen
from ..arguments import WindowSize, infinite_lse, keywords, longest_of, refuse, window_of
from .probabilities import new_seed, packed_probabilities

Outputs = Any  # a tensor, or `(out, softmax_lse, S_dmask)`; untyped, as in flash_attn, so that checkers take `out + 1`
EXAMPLE = "flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, causal=True)"


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Outputs:
    """Attention over packed sequences of different lengths, with FlashAttention-2's arguments.

    Args:
        q: queries `[Tq, Hq, D]`, the tokens of one sequence after another's.
        k: keys `[Tk, Hkv, D]`, or with `block_table` pages `[num_pages, page_size, Hkv, D]`, of any page size.
        v: the same with Dv.
        cu_seqlens_q: int32 or int64 `[B + 1]`, offsets of the sequences in q.
        cu_seqlens_k: the same for keys; with `block_table` it gives their numbers.
        max_seqlen_q: an int, at least the longest sequence's queries; a tensor of one integer is read back.
        max_seqlen_k: the same for keys.
        block_table: int32 or int64 `[B, max_pages]`, the pages of each sequence.

    The other arguments: as in `flash_attn_func`.

    Returns:
        `out [Tq, Hq, Dv]`; with `return_attn_probs` `(out, softmax_lse [Hq, Tq], S_dmask [B, Hq, max_seqlen_q,
        max_seqlen_k])`. Tokens behind the last sequence give 0.

    Raises:
        ArgumentError: an argument is not what it should be, or S_dmask of pages is requested.
    """
    window = window_of(window_size, EXAMPLE)
    settings = keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    settings["cu_seqlens_q"], settings["cu_seqlens_k"] = cu_seqlens_q, cu_seqlens_k
    settings["max_seqlen_q"] = longest = longest_of(max_seqlen_q)
    settings["max_seqlen_k"] = longest if max_seqlen_k is max_seqlen_q else longest_of(max_seqlen_k)
    settings["page_table"] = block_table
    if return_attn_probs:
        return with_probabilities(q, k, v, settings)
    return attention_varlen(q, k, v, **settings)


@options_of(flash_attn_varlen_func, without=("block_table",))
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *options: Any,
    **keywords: Any,
) -> Outputs:
    """Attention as by `flash_attn_varlen_func`, of keys and values in one tensor, `kv [Tk, 2, Hkv, D]`."""
    k, v = kv.unbind(1)
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *sequences, *options, **keywords)


@options_of(flash_attn_varlen_func, without=("block_table",))
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *options: Any, **keywords: Any
) -> Outputs:
    """Attention as by `flash_attn_varlen_func`, of queries, keys and values in one tensor, `qkv [T, 3, H, D]`."""
    q, k, v = qkv.unbind(1)
    sequences = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *sequences, *options, **keywords)


def with_probabilities(q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `(out, softmax_lse, S_dmask)` of a packed call."""
    has_dropout = settings["dropout_p"] > 0
    if has_dropout and settings["page_table"] is not None:
        accepted = "False for a call with `block_table` and dropout: a page may belong to several sequences"
        refuse("return_attn_probs", True, accepted, EXAMPLE)
    if has_dropout:
        settings["dropout_seed"] = new_seed(q)
    out, lse = attention_varlen(q, k, v, **settings, return_lse=True)
    probabilities = packed_probabilities(q, k, settings) if has_dropout else q.new_empty(0)
    return out, infinite_lse(lse), probabilities
