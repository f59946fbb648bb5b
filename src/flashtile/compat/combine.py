"""`flash_attn_combine` of FlashAttention-3: attentions over parts of the keys, put together."""

import torch
from torch import Tensor

from .. import merge_attention
from .arguments import refuse

EXAMPLE = "flash_attn_combine(out_partial, lse_partial)  # [splits, B, S, H, D] and [splits, B, S, H] of float32"


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from attentions over `num_splits` disjoint sets of keys. Differentiable.

    Args:
        out_partial: `[num_splits, B, S, H, D]`, floating-point; the original takes float32.
        lse_partial: `[num_splits, B, S, H]`, natural logarithms; -inf where a part has no key for a row, whose
            `out_partial` then may be anything, as in the original.
        out: a tensor `[B, S, H, D]` for the result, of its dtype.
        out_dtype: dtype of the result; `out_partial`'s if `None`.

    Returns:
        `out [B, S, H, D]` and `lse [B, S, H]`, which lies in memory as `[B, H, S]`. Rows without a key in any part have
        0 and -inf.

    Raises:
        ArgumentError: shapes or dtypes do not fit together, or there is no part.
    """
    if out_partial.dim() != 5 or len(out_partial) == 0:
        refuse("out_partial", out_partial, "[num_splits, B, S, H, D] with one part or more", EXAMPLE)
    if lse_partial.shape != out_partial.shape[:-1]:
        refuse("lse_partial", lse_partial, f"{list(out_partial.shape[:-1])}", EXAMPLE)
    dtype = out_partial.dtype if out_dtype is None else out_dtype
    if out is not None and (out.shape, out.dtype) != (out_partial.shape[1:], dtype):
        refuse("out", out, f"{list(out_partial.shape[1:])} of {dtype}", EXAMPLE)
    out_partial = out_partial.masked_fill((lse_partial == -torch.inf).unsqueeze(-1), 0)
    parts, lses = (x.transpose(2, 3).unbind() for x in (out_partial, lse_partial))  # [B, H, S, D], [B, H, S]
    merged, lse = merge_attention(parts, lses)
    merged = merged.transpose(1, 2).to(dtype)
    return merged.contiguous() if out is None else out.copy_(merged), lse.contiguous().transpose(1, 2)
