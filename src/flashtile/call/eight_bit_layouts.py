"""Calls with tensors of 8 bits in forms that more backends take: keys in pages, queries in float32.

A dense sequence is one page, and so is a packed token. A backend with kernels for such calls as they are needs neither.
"""

import torch
from torch import Tensor

from .call import Call
from .eight_bit import is_eight_bit, key_scales, query_scales


def dequantized(call: Call) -> Call:
    """The call with keys in pages, and queries in float32 times their scales. Calls without 8 bits stay as they are."""
    if not is_eight_bit(call.tensors.k):
        return call
    call = in_pages(call)
    if not is_eight_bit(call.tensors.q):
        return call
    t = call.tensors
    q = t.q.float()
    if t.q_descale is not None:
        q = q * row_scales(call)
    settings = call.settings._replace(out_dtype=str(call.out_dtype).removeprefix("torch."))
    return call._replace(tensors=t._replace(q=q, q_descale=None), settings=settings)


def row_scales(call: Call) -> Tensor:
    """The scales of queries, `[B|1, Hq, Sq|1, 1]` or packed `[Tq|1, Hq, 1]`."""
    t = call.tensors
    assert t.q_descale is not None
    heads_kv, batch = t.k.shape[1 if call.layout == "dense" else -2], batch_of(call)
    x = query_scales(t.q_descale, t.q, heads_kv, batch)
    assert x is not None
    x = x if x.shape[1] == t.q.shape[1] else x.repeat_interleave(t.q.shape[1] // heads_kv, 1)  # [B|1, Hq, rows|1]
    if t.cu_seqlens_q is None:
        return x[..., None]
    if x.shape[0] == 1:
        return x[0].t()[..., None]
    token = torch.arange(t.q.shape[0], device=t.q.device)
    sequence = torch.searchsorted(t.cu_seqlens_q[1:].long(), token, right=True).clamp(max=batch - 1)
    return x[sequence]


def batch_of(call: Call) -> int:
    """The number of sequences."""
    t = call.tensors
    return t.q.shape[0] if t.cu_seqlens_q is None else t.cu_seqlens_q.shape[0] - 1


def in_pages(call: Call) -> Call:
    """The call with keys and values of 8 bits in pages; other calls stay as they are."""
    t, layout = call.tensors, call.layout
    if not is_eight_bit(t.k) or layout == "paged":
        return call
    batch = batch_of(call)
    k_descale, v_descale = (
        None if x is None else key_scales(x, t.k, batch, layout) for x in (t.k_descale, t.v_descale)
    )
    tensors = t._replace(k_descale=k_descale, v_descale=v_descale, k=as_pages(t.k), v=as_pages(t.v))
    most = most_keys(call)
    if layout == "dense":
        table, lengths = page_of_sequence(batch, t.q.device), keys_of_sequence(batch, most, t.q.device)
        tensors = tensors._replace(page_table=table, seqused_k=lengths)
    else:
        assert t.cu_seqlens_k is not None
        tensors = tensors._replace(page_table=pages_of_tokens(most, t.cu_seqlens_k))
    return call._replace(tensors=tensors, settings=call.settings._replace(max_seqlen_k=most))


def most_keys(call: Call) -> int:
    """The keys of the longest sequence, as far as the host knows it."""
    keys: int = call.tensors.k.shape[2 if call.layout == "dense" else 0]
    most = None if call.layout == "dense" else call.settings.max_seqlen_k
    return keys if most is None else min(max(most, 0), keys)


def as_pages(x: Tensor) -> Tensor:
    """Dense or packed keys as pages `[num_pages, page_size, Hkv, D]`, a view."""
    return x.transpose(1, 2) if x.dim() == 4 else x[:, None]


def page_of_sequence(batch: int, device: torch.device) -> Tensor:
    """The page table of dense keys, int32 `[B, 1]`."""
    return torch.arange(batch, dtype=torch.int32, device=device)[:, None]


def keys_of_sequence(batch: int, keys: int, device: torch.device) -> Tensor:
    """The lengths of dense keys, int32 `[B]`."""
    return torch.full((batch,), keys, dtype=torch.int32, device=device)


def pages_of_tokens(most: int, cu_seqlens_k: Tensor) -> Tensor:
    """The page table of packed keys, `[B, most]`: pages are tokens."""
    return cu_seqlens_k[:-1, None] + torch.arange(most, dtype=cu_seqlens_k.dtype, device=cu_seqlens_k.device)
