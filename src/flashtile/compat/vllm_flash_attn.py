"""The interface of vLLM's FlashAttention, module `vllm.vllm_flash_attn`, by flashtile.

Names, order and defaults of arguments, shapes and results are the original's. One function serves all versions.
"""

from typing import Any

from torch import Tensor

from ..api.signatures import options_of
from ..api.varlen import attention_varlen
from . import flash_attn_3
from .arguments import WindowSize, above, descales_of, infinite_lse, keywords, longest_of, refuse, window_of

__all__ = [
    "fa_version_unsupported_reason",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
    "is_fa_version_supported",
]

VERSIONS = (2, 3, 4)
EXAMPLE = (
    "flash_attn_varlen_func(q, k_cache, v_cache, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k=lengths, "
    "block_table=block_table, causal=True)"
)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: WindowSize | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: Tensor | None = None,
) -> Any:
    """Attention over packed sequences, or over pages, with vLLM's arguments.

    Args:
        q: queries `[Tq, Hq, D]`.
        k: keys `[Tk, Hkv, D]` with `cu_seqlens_k`, or with `block_table` pages `[num_pages, page_size, Hkv, D]`.
        v: the same with Dv.
        cu_seqlens_q: int32 or int64 `[B + 1]`, offsets of the sequences in q; `cu_seqlens_k` the same for k.
        seqused_k: integers `[B]`, keys of each sequence that exist; with `block_table` it is required.
        block_table: integers `[B, max_pages]`.
        q_v: queries of their own for the values, `[Tq, Hq, Dv]`.
        s_aux: `[Hq]`, floating-point; `exp(s_aux)` joins each row's denominator, for every version.
        out: a tensor for the result, of its shape and dtype, which is returned.
        fa_version: 2, 3 or 4. It decides what `softmax_lse` is for a row that sees no key: +inf with 2, else -inf.
        window_size: `(left, right)`, where -1 is unlimited; `None` is no window.

    The other arguments: as in `flashtile.compat.flash_attn.flash_attn_varlen_func`. `scheduler_metadata` and
    `return_attn_probs` are accepted and ignored, as there. Descales are of q, k
    and v of 8 bits, as in `flashtile.compat.flash_attn_3`; `cp_world_size` above 1 is declined.

    Returns:
        `out [Tq, Hq, Dv]`; with `return_softmax_lse` `(out, softmax_lse [Hq, Tq])`.

    Raises:
        ArgumentError: an argument is not what it should be, or has no equivalent.
    """
    descales = descales_of(EXAMPLE, q, k, q_descale, k_descale, v_descale)
    if cp_world_size != 1 or cp_rank != 0 or cp_tot_seqused_k is not None:
        refuse("cp_world_size", cp_world_size, "1; flashtile.distributed shares a cache between ranks", EXAMPLE)
    if fa_version not in VERSIONS:
        refuse("fa_version", fa_version, "2, 3 or 4", EXAMPLE)
    window = None if window_size is None else window_of(window_size, EXAMPLE)
    settings = keywords(dropout_p, softmax_scale, causal, window, softcap, alibi_slopes, deterministic)
    settings["max_seqlen_q"], settings["max_seqlen_k"] = longest_of(max_seqlen_q), longest_of(max_seqlen_k)
    settings["num_splits"] = above(0, num_splits)
    result, lse = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k=seqused_k,
        page_table=block_table,
        sinks=s_aux,
        qv=q_v,
        out=out,
        return_lse=True,
        **settings,
        **descales,
    )
    if not return_softmax_lse:
        return result
    return result, infinite_lse(lse) if fa_version == 2 else lse


@options_of(flash_attn_3.get_scheduler_metadata, without=("attention_chunk",))
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    *options: Any,
    **keywords: Any,
) -> Tensor:
    """A `scheduler_metadata` for `flash_attn_varlen_func`, which ignores it: an empty int32 tensor."""
    sizes = batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim
    return flash_attn_3.get_scheduler_metadata(*sizes, cache_seqlens, *options, **keywords)


def is_fa_version_supported(fa_version: int, device: Any = None) -> bool:
    """Whether `flash_attn_varlen_func` takes that `fa_version`: 2, 3 and 4, on every device."""
    return fa_version in VERSIONS


def fa_version_unsupported_reason(fa_version: int, device: Any = None) -> str | None:
    """Why `fa_version` is not taken; `None` if it is."""
    return None if fa_version in VERSIONS else f"fa_version is 2, 3 or 4, not {fa_version}"
