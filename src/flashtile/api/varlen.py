"""The public function for packed sequences and pages: what each argument means, and nothing else."""

from __future__ import annotations  # not evaluated at `import flashtile`

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from ..call.advice import public, refuse
from .latent import with_query_of_values
from .normalize import normalize
from .out import direct_out
from .public_call import Request, public_call
from .settings import values_of
from .signatures import (
    Causal,
    MaskArgument,
    ScoreModArgument,
    VarlenKeywords,
    WindowArgument,
)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[VarlenKeywords],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[VarlenKeywords],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *,
    return_lse: bool,
    **keywords: Unpack[VarlenKeywords],
) -> Tensor | tuple[Tensor, Tensor]: ...
@public
@public_call
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    *more: Any,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    qv: Tensor | None = None,
    causal: Causal = False,
    window: WindowArgument = None,
    attention_chunk: int | None = None,
    mask: MaskArgument = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    score_mod: ScoreModArgument = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    v_dim: int | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
    **unknown: Any,
) -> Request:
    """Attention over sequences of different lengths, packed one after another; each sees only itself.

    Positions (of causal, window, bias, mask, ALiBi, score_mod and dropout) count from the start of each sequence.

    Example:
        >>> cu_seqlens = torch.tensor([0, 100, 300], dtype=torch.int32)  # sequences of 100 and 200 tokens
        >>> q, k, v = torch.randn(300, 8, 64), torch.randn(300, 2, 64), torch.randn(300, 2, 64)
        >>> flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True).shape
        torch.Size([300, 8, 64])

    Args:
        q: queries `[Tq, Hq, D]`: the sequences' tokens one after another; dtypes as in `attention`. Rows past
            `cu_seqlens_q[-1]` give 0.
        k: keys `[Tk, Hkv, D]`, of q's dtype or 8 bits; with `page_table`, pages `[num_pages, page_size, Hkv, D]`.
        v: values `[Tk, Hkv, Dv]`, or pages `[num_pages, page_size, Hkv, Dv]`; `None` with `v_dim`.
        cu_seqlens_q: int32 or int64 `[B + 1]`, offsets of the sequences in q, starting with 0 and never falling.
        cu_seqlens_k: the same for k; may be `None` if both `page_table` and `seqused_k` are given.
        max_seqlen_q: an int, at least the longest sequence's queries; `None` stands for all tokens, and reads nothing
            back.
        max_seqlen_k: the same for keys.
        seqused_q: int32 or int64 `[B]`, queries of each sequence that are in use, and that `Sq` counts; the rows past
            them are not read, and give 0 with a log-sum-exp of -inf.
        seqused_k: int32 or int64 `[B]`, keys of each sequence that exist; the rest are never read.
        page_table: int32 or int64 `[B, max_pages]`: keys `p * page_size` onwards of sequence b are page
            `page_table[b, p]` (Kwon et al., "PagedAttention", section 4.1).
        q_descale: as in `attention`; `[Hkv]`, `[B, Hkv]` or `[Hq, Tq]`.
        k_descale, v_descale: float32, the scales of k and v in float8_e4m3fn, float8_e5m2 or int8, which multiply what
            is read: `[Hkv]`, `[B, Hkv]`, `[Hkv, Tk]`, or of pages `[num_pages, Hkv]` or `[num_pages, page_size, Hkv]`;
            1 if `None`. Such calls have no gradients.
        qv: `[Tq, Hq, Dv]`, a second part of the queries, against the values: scores are `scale * (<q, k> + <qv, v>)`,
            with `scale` `(D + Dv) ** -0.5` by default. Rows of v and k that lie one behind the other, as
            `kv[..., :Dv]` and `kv[..., Dv:]`, are read as they are; others are copied together.
        mask, bias: as in `attention`; tensors are against `[B, Hq, max_seqlen_q, max_seqlen_k]`.

    The other arguments: as in `attention`.

    Returns:
        `out [Tq, Hq, Dv]` in q's dtype or `out_dtype`; with `return_lse` also `lse [Hq, Tq]`, as of `attention`.

    Raises:
        ArgumentError: an argument is not what it should be; one that the function does not have is also a `TypeError`.
            Lengths and pages are read where they are on a CPU; on a GPU, entries that point outside the tensors are
            keys that do not exist.
        BackendError: no backend takes the call, or the named one does not.
    """
    if more or unknown:
        refuse("attention_varlen", more, unknown)
    if qv is not None:
        q, k, v_dim, _ = with_query_of_values("attention_varlen", q, k, v, qv)
        v = None
    v, v_descale, v_dim = values_of("attention_varlen", k, v, k_descale, v_descale, v_dim)
    tensors = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {"seqused_q": seqused_q, "seqused_k": seqused_k, "page_table": page_table}
    tensors |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    direct = None
    if out is not None:
        direct = direct_out("attention_varlen", out, q, v, (*tensors.values(), score_mod), out_dtype)
        if direct is not None and seqused_q is None:  # else kernels leave rows out
            tensors["out"] = direct
    call = normalize(
        "attention_varlen",
        tensors,
        causal=causal,
        window=window,
        attention_chunk=attention_chunk,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        num_splits=num_splits,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        out_dtype=out_dtype,
        backend=backend,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        v_dim=v_dim,
    )
    return Request(call, return_lse, out, direct)
