"""The public function for tensors of one length: what each argument means, and nothing else."""

from __future__ import annotations  # not evaluated at `import flashtile`

from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor

from ..call.advice import public, refuse
from ..call.window import ExactWindow as ExactWindow  # part of the interface, as the functions are
from .normalize import normalize
from .out import direct_out
from .public_call import Request, public_call
from .settings import values_of
from .signatures import (
    Causal,
    Keywords,
    MaskArgument,
    ScoreModArgument,
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
