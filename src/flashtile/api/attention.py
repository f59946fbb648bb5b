"""The public functions: what each argument means, and nothing else. `normalize` and `autograd` do the work."""

from __future__ import annotations  # not evaluated at `import flashtile`

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from ..call.advice import public, refuse
from ..call.cache import CacheCall
from ..call.cache_tensors import CacheTensors
from ..call.window import ExactWindow as ExactWindow  # part of the interface, as the functions are
from ..dispatch.cache_operator import attend_with_cache
from .latent import cache_with_query_of_values, with_query_of_values
from .latent_rows import packed_cache
from .normalize import lengths_of, normalize
from .out import direct_out
from .public_call import Request, public_call
from .settings import rotary_of, values_of
from .signatures import (
    CacheKeywords,
    Causal,
    Keywords,
    Lengths,
    MaskArgument,
    ScoreModArgument,
    VarlenKeywords,
    WindowArgument,
)


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor | None, *, return_lse: Literal[False] = False, **keywords: Unpack[Keywords]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor | None, *, return_lse: Literal[True], **keywords: Unpack[Keywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor | None, *, return_lse: bool, **keywords: Unpack[Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
@public
@public_call
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *more: Any,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
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
    """Exact attention, `softmax(scale * q k^T) v`, in O(S) memory, differentiable in every floating-point tensor.

    The features act on the scores in this order: softcap, bias, ALiBi, score_mod, visibility. A row that sees no key
    gives 0, with a log-sum-exp of -inf (or its sink). The algorithm follows Dao, "FlashAttention-2", section 3.1;
    docs/contract.md has the formula and the error bound. Numbers may be NumPy's, but inside `torch.compile`.
    DTensors, and calls in `flashtile.distributed.context_parallel`, are sharded over a mesh (docs/distributed.md).

    Example:
        >>> q = torch.randn(2, 8, 100, 64)  # [B, Hq, Sq, D]
        >>> k, v = torch.randn(2, 2, 300, 64), torch.randn(2, 2, 300, 64)  # four query heads for each key head
        >>> flashtile.attention(q, k, v, causal=True).shape
        torch.Size([2, 8, 100, 64])
        >>> out, lse = flashtile.attention(q, k, v, window=(63, 0), return_lse=True)
        >>> lse.shape
        torch.Size([2, 8, 100])

    Args:
        q: queries `[B, Hq, Sq, D]`; float16, bfloat16, float32, float64 or float8_e4m3fn; D from 1 to 1024; any
            strides.
        k: keys `[B, Hkv, Sk, D]`, on q's device; of q's dtype, or of float8_e4m3fn, float8_e5m2 or int8, as
            queries of 8 bits need them. Hq is a multiple of Hkv; query head h reads key/value head `h // (Hq // Hkv)`.
        v: values `[B, Hkv, Sk, Dv]`, of k's dtype; `None` with `v_dim`.
        q_descale: float32, the scales of queries of 8 bits, which multiply them: `[Hkv]`, `[B, Hkv]` (of a group's
            query heads, as FlashAttention-3's) or `[B, Hq, Sq]`; 1 if `None`. Calls with tensors of 8 bits have no
            gradients, and with queries of 8 bits no dropout.
        k_descale, v_descale: the same of keys and values of 8 bits: `[Hkv]`, `[B, Hkv]` or `[B, Hkv, Sk]`.
        causal: `True` hides keys `j > i + Sk - Sq` (the last query sees every key); `"top_left"` hides `j > i`.
        window: `(left, right)`: key j is visible iff `i + Sk - Sq - left <= j <= i + Sk - Sq + right`; `None` or -1
            is unlimited. With `causal`, both hold (Beltagy et al., "Longformer", section 3.1). Integers, of tokens;
            other negative ones move the window away from the query's own key. In a `flashtile.ExactWindow`, a -1 is
            one of those.
        attention_chunk: an int c, positions that see each other only: key j is visible iff
            `floor((i + Sk - Sq) / c) == floor(j / c)` (chunked attention, as in Llama 4); `None` or 0 is no chunks.
        mask: bool `[B, Hq, Sq, Sk]`, each dimension may be 1; True is visible. Or a `flashtile.MaskMod`, or a function
            `(b, h, q_idx, k_idx) -> bool` of torch operations (as in Dong et al., "Flex Attention", 2024); or lists of
            blocks, a `flashtile.BlockMask` or PyTorch's, for calls of these lengths.
        scale: factor of the products, finite in float32; `D ** -0.5` if `None`.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, section 2).
        bias: added to the scores; `[B, Hq, Sq, Sk]`, each dimension may be 1; any floating-point dtype. One that is
            neither q's nor float32 is copied to float32. Its gradient has its dtype, and takes memory in proportion to
            it.
        alibi_slopes: `[Hq]` or `[B, Hq]`, of any floating-point dtype, as `bias`; `slope * |i + Sk - Sq - j|` is
            subtracted (Press et al., "ALiBi", section 3).
        sinks: `[Hq]`, of any floating-point dtype, as `bias`; `exp(sink)` joins each row's denominator (Xiao et al.,
            "Attention sinks", section 3).
        score_mod: a `flashtile.ScoreMod`, or a function `(score, b, h, q_idx, k_idx) -> score` of torch operations
            (as in Dong et al., "Flex Attention", 2024).
        dropout_p: the probability of dropping a weight, `0 <= p < 1`. Which are dropped depends on the seed and the
            positions alone: not on backend, device or layout.
        dropout_seed: an int of 64 bits, or an int64 tensor of one element on q's device; by default drawn from torch's
            generator (Philox: Salmon et al., "Parallel random numbers", 2011).
        return_lse: also return the log-sum-exp of each row's scores; it is differentiable.
        num_splits: an int, into how many parts the keys are split in forward, where parts are computed side by side;
            `None` lets the backend choose. The result is the same up to rounding. It is a hint as FlashAttention's:
            docs/contract.md has the calls that take keys in order, and `flashtile.explain` says so of one.
        v_dim: an int, the values are the first `v_dim` columns of k, `v = k[..., :v_dim]`, and are loaded once, as in a
            latent cache (DeepSeek-AI, "DeepSeek-V2", section 2.1). Outside of `torch.compile`, a v that is such a view
            and narrower than k means the same. Pass `scale`: the default, `D ** -0.5` of all columns, is no
            model's, whose heads have other widths before the projections are absorbed.
        deterministic: `True` gives the same bits for the same call; `None` follows
            `torch.are_deterministic_algorithms_enabled()`.
        batch_invariant: `True` makes the bits of a row of `out` and `lse` depend on its own sequence alone: not on the
            batch, the neighbors' lengths or, causal, where the sequence is cut (docs/contract.md, Batch invariance).
        out_dtype: of queries of 8 bits, the result's: bfloat16 (if `None`), float16 or float32.
        out: a tensor for the result, of its shape, dtype and device; any strides. For calls without derivatives.
            Kernels write into it if its rows are aligned to 16 bytes and it shares storage with no input; else, and
            under `torch.compile`, the result is copied.
        backend: `"auto"` takes the fastest that accepts the call; a named one is never replaced by another.

    Returns:
        `out [B, Hq, Sq, Dv]` in q's dtype or `out_dtype`, the tensor `out` if that was given; with `return_lse` also
        `lse [B, Hq, Sq]`, natural logarithm, in float32 (float64 for float64 inputs).

    Raises:
        ArgumentError: an argument is not what it should be; one that the function does not have is also a `TypeError`.
        BackendError: no backend takes the call, or the named one does not.
    """
    if more or unknown:
        refuse("attention", more, unknown)
    v, v_descale, v_dim = values_of("attention", k, v, k_descale, v_descale, v_dim)
    tensors = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    tensors |= {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    direct = None
    if out is not None:
        direct = direct_out("attention", out, q, v, (*tensors.values(), score_mod), out_dtype)
        if direct is not None:
            tensors["out"] = direct
    call = normalize(
        "attention",
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
        v_dim=v_dim,
    )
    return Request(call, return_lse, out, direct)


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


@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[CacheKeywords],
) -> Tensor: ...
@overload
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *, return_lse: Literal[True], **keywords: Unpack[CacheKeywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor | None, *, return_lse: bool, **keywords: Unpack[CacheKeywords]
) -> Tensor | tuple[Tensor, Tensor]: ...
@public
@public_call
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *more: Any,
    cache_seqlens: Lengths,
    page_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_start: Lengths | None = None,
    rotary_q_fixed: bool = False,
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
    """Append new keys and values to a cache, in place, and attend over all that it then holds; for inference.

    Sequence b has `Sk[b] = cache_seqlens[b] + appended keys`; its queries are its last tokens, at the positions
    `Sk[b] - Sq[b] + i`, for causal and window as for rotary. `cache_seqlens` itself is not changed: add the number of
    appended keys before the next step. Under `torch.compile` and in CUDA graphs it is one operator that reads
    nothing back. docs/kvcache.md has what a cache means, and a decode loop.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 2, 512, 64), torch.zeros(2, 2, 512, 64)  # room for 512 keys each
        >>> lengths = torch.tensor([7, 300], dtype=torch.int32)  # keys that are there
        >>> q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 1, 64), torch.randn(2, 2, 1, 64)  # one token each
        >>> out = flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, causal=True)
        >>> lengths += 1
        >>> torch.equal(k_cache[1, :, 300], k[1, :, 0])
        True

    Args:
        q: queries `[B, Hq, Sq, D]`, or packed `[Tq, Hq, D]` with `cu_seqlens_q`; dtypes as in `attention`. Those of 8
            bits have caches of 8 bits, and new k and v in bfloat16, float16 or float32, and no rotary positions.
        k_cache: `[B_cache, Hkv, S_max, D]`, or with `page_table` pages `[num_pages, page_size, Hkv, D]`, of any page
            size (Kwon et al., "PagedAttention", section 4.1); any strides; q's device, and its dtype or float8_e4m3fn,
            float8_e5m2 or int8, in which new keys are quantized.
        v_cache: the same with Dv; `None` with `v_dim`.
        cache_seqlens: int32 or int64 `[B]`, as all lengths and indices here, or an int for all; keys in each sequence's
            cache before this call.
        page_table: int32 `[B, max_pages]`, as in `attention_varlen`; with `cache_batch_idx`, any number of rows.
        cache_batch_idx: int32 `[B]`, each sequence's row of a dense cache, or of `page_table`; `None` is 0, 1, 2, ...
        leftpad_k: int32 `[B]`, positions at the front of each cache that hold no key. They count as positions, so
            that indices and rotary angles count the cache's slots.
        cu_seqlens_q: int32 `[B + 1]`, offsets of the sequences in packed q, and in k and v that are packed alike.
        cu_seqlens_k_new: int32 `[B + 1]`, offsets in k and v that are packed by other lengths than q.
        k, v: keys and values to append, `[B, Hkv, S_new, D]` and Dv, or packed `[T_new, Hkv, D]` and Dv.
        rotary_cos, rotary_sin: `[S_rotary, rotary_dim / 2]`, q's dtype or float32, rotary_dim at most D; q and the
            appended k are turned by the angles of their positions (Su et al., "RoFormer", section 3.2.2). Kept in q's
            dtype after it.
        rotary_interleaved: pairs are features (0, 1), (2, 3), ... (GPT-J); if False, (n, n + rotary_dim / 2)
            (GPT-NeoX).
        rotary_start: int32 `[B]`, or an int for all: the position, for rotary alone, of each sequence's first query and
            of its first appended key. `None`: `Sk - Sq` and `cache_seqlens`.
        rotary_q_fixed: turn all queries of a sequence as its first one.
        q_descale: as in `attention`; `[Hkv]`, `[B, Hkv]`, `[B, Hq, Sq]`, or packed `[Hq, Tq]`.
        k_descale, v_descale: float32, the scales of caches of 8 bits: `k = k_cache * k_descale`; 1 if `None`. One for
            each head, `[Hkv]` or `[B, Hkv]`, for each page and head, `[num_pages, Hkv]`, or for each token and head,
            `[B_cache, Hkv, S_max]` or `[num_pages, page_size, Hkv]`: these are computed for new tokens, and written in
            place.
        v_dim: as in `attention`: values are columns of k_cache, and k alone is appended. `v_descale` is k_descale, and
            not given. With 512 and 576 features of q, k_cache may have rows of 656 bytes, uint8 or float8_e4m3fn, as of
            `pack_latent_rows` (docs/kvcache.md), into which new keys are packed.
        qv: as in `attention_varlen`, in the shape of q with Dv. k and v are appended as they are without it.

    The other arguments: as in `attention`; `mask` and `bias` broadcast to `[B, H, Sq, S_max]` (pages:
    `max_pages * page_size`).

    Returns:
        `out` in the shape of q with Dv; with `return_lse` also `lse`, `[B, Hq, Sq]` or `[Hq, Tq]`.

    Raises:
        ArgumentError: an argument is not what it should be; one that the function does not have is also a `TypeError`.
            On a CPU also a cache, page table or rotary table that is too small, and entries outside the pages; on a
            GPU such keys do not exist and are not written.
        AttentionError: a tensor requires a gradient, or forward-mode is active: this call has no derivatives.
        BackendError: no backend takes the call, or the named one does not.
    """
    if more or unknown:
        refuse("attention_with_kvcache", more, unknown)
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = lengths_of("cache_seqlens", cache_seqlens, q, cu_seqlens_q)
    if rotary_start is not None and not isinstance(rotary_start, Tensor):
        rotary_start = lengths_of("rotary_start", rotary_start, q, cu_seqlens_q)
    if qv is not None:
        joined, k = cache_with_query_of_values(q, k_cache, v_cache, k, v, qv, rotary_cos)
        (q, k_cache, v_dim, _), v_cache, v = joined, None, None
    if v_dim is not None:
        k_cache = packed_cache(q, k_cache, v_dim)
    values: Tensor
    values, v_descale, v_dim = values_of(
        "attention_with_kvcache", k_cache, v_cache, k_descale, v_descale, v_dim, appends=v is not None
    )
    cache = CacheTensors(
        k_cache, values, cache_seqlens, page_table, cache_batch_idx, leftpad_k, rotary_start, cu_seqlens_k_new, k, v,
        rotary_cos, rotary_sin, k_descale, v_descale,
    )  # fmt: skip
    rotary = rotary_of(rotary_interleaved, rotary_q_fixed)
    tensors = {"q": q, "k": k_cache, "v": values, "mask": mask, "bias": bias}
    tensors |= {"alibi_slopes": alibi_slopes, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "q_descale": q_descale}
    direct = None
    if out is not None:
        inputs = (*tensors.values(), *cache, score_mod)
        direct = direct_out("attention_with_kvcache", out, q, values, inputs, out_dtype)
        if direct is not None:
            tensors["out"] = direct
    call = normalize(
        "attention_with_kvcache",
        tensors,
        causal=causal,
        window=window,
        attention_chunk=attention_chunk,
        scale=scale,
        softcap=softcap,
        score_mod=score_mod,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        out_dtype=out_dtype,
        backend=backend,
        num_splits=num_splits,
        cache=cache,
        v_dim=v_dim,
    )
    return Request(CacheCall(call, cache, rotary), return_lse, out, direct, attend_with_cache)
