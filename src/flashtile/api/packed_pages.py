"""Packed keys and values of 8 bits, as pages of one token each, which kernels read in place."""

from typing import Any

import torch
from torch import Tensor

from ..call.check import EXAMPLES, offsets
from ..call.device import host_readable
from ..call.eight_bit import DESCALES, is_eight_bit
from ..call.features import INDEX_DTYPES
from ..errors import ArgumentError


def with_packed_in_pages(tensors: dict[str, Any], max_seqlen_k: Any) -> dict[str, Any]:
    """The tensors of a packed call. Keys of 8 bits, `k [Tk, Hkv, D]`, become pages of a token each, for sequences of
    up to `max_seqlen_k` keys, or up to all if that is not a number. Other keys stay as they are.

    Raises:
        ArgumentError: offsets, or scales that are neither `[Hkv]`, `[B, Hkv]` nor `[Hkv, Tk]`.
    """
    k, v, starts = tensors["k"], tensors["v"], tensors["cu_seqlens_k"]
    if tensors.get("page_table") is not None or not isinstance(k, Tensor) or k.dim() != 3 or not is_eight_bit(k):
        return tensors
    example = EXAMPLES["varlen"]
    if not isinstance(starts, Tensor) or starts.dtype not in INDEX_DTYPES or starts.dim() != 1 or len(starts) == 0:
        raise ArgumentError("cu_seqlens_k", starts, "int32 (or int64) offsets [B + 1] of packed keys", example)
    if host_readable(k) and not torch.compiler.is_compiling():
        offsets("cu_seqlens_k", starts, k.shape[0], None, example)
    most: Any = k.shape[0]
    if isinstance(max_seqlen_k, int | torch.SymInt) and not isinstance(max_seqlen_k, bool):
        most = min(max(max_seqlen_k, 0), most)
    found = tensors | {
        "k": k[:, None],
        "v": v[:, None] if isinstance(v, Tensor) and v.dim() == 3 else v,
        "page_table": starts[:-1, None] + torch.arange(most, dtype=starts.dtype, device=starts.device),
    }
    for name in DESCALES:
        x = tensors.get(name)
        if isinstance(x, Tensor):
            found[name] = of_pages(name, x, len(starts) - 1, *k.shape[:2])
    return found


def of_pages(name: str, x: Tensor, batch: int, tokens: int, heads: int) -> Tensor:
    """Scales as a view `[B|1, Tk|1, 1, Hkv]`."""
    of_tokens, of_sequences = x.shape == (heads, tokens), x.shape == (batch, heads)
    accepted = f"float32 [Hkv], [B, Hkv] or [Hkv, Tk] with B = {batch}, Hkv = {heads}, Tk = {tokens}"
    if of_tokens and of_sequences:
        accepted = f"[1, Tk, 1, Hkv] for scales of tokens or [B, 1, 1, Hkv] for those of sequences: both are {heads}"
    elif x.dtype is torch.float32 and x.dim() == 4:
        return x
    elif x.dtype is torch.float32 and of_tokens:
        return x.t()[None, :, None]
    elif x.dtype is torch.float32 and of_sequences:
        return x[:, None, None]
    elif x.dtype is torch.float32 and x.shape == (heads,):
        return x[None, None, None]
    raise ArgumentError(name, x, accepted, EXAMPLES["varlen"])
