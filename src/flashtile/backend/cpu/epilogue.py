"""Torch operations after (and, for pages, before) a backward kernel: pages, padded rows, sums over rows."""

import torch
from torch import Tensor

from ...call.call import Call, new_rows

CHUNK = 64


def without_padding(like: Tensor, dx: Tensor | None) -> Tensor | None:
    """A gradient without the features that pad its rows to whole vectors."""
    if dx is None or dx.shape[-1] == like.shape[-1]:
        return dx
    return new_rows(like, like.shape[1], like.shape[-1], dx.dtype).copy_(dx[..., : like.shape[-1]])


def slope_gradient(call: Call, of_rows: Tensor) -> Tensor:
    """Sum the contributions of rows, `[B, H, S]` or packed `[H, T]`, to the shape of the slopes, `[H]` or `[B, H]`."""
    slopes, bounds = call.tensors.alibi_slopes, call.tensors.cu_seqlens_q
    assert slopes is not None
    if bounds is None:
        of_rows = of_rows.sum(dim=-1)
    else:
        of_rows = segment_sums(of_rows[:, : int(bounds[-1])], bounds.diff().long())
    return of_rows if slopes.dim() == 2 else of_rows.sum(dim=0)


def segment_sums(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum packed sequences `[H, T]` to `[B, H]`, in a tree: chunks first, then their sums, until one is left, so that
    rounding errors do not grow with the length.
    """
    while bool((lengths > 1).any()):
        chunks = (lengths + CHUNK - 1) // CHUNK
        shift = (chunks.cumsum(0) - chunks) * CHUNK - (lengths.cumsum(0) - lengths)  # each sequence's shift by padding
        place = torch.arange(x.shape[1]) + shift.repeat_interleave(lengths)
        padded = x.new_zeros((x.shape[0], int(chunks.sum()) * CHUNK))
        x, lengths = padded.index_copy_(1, place, x).unflatten(1, (-1, CHUNK)).sum(dim=-1), chunks
    sums = x.new_zeros((len(lengths), x.shape[0]))
    sums[lengths > 0] = x.t()
    return sums


def gather_pages(call: Call) -> tuple[Call, Tensor]:
    """Turn a paged call into a packed one; also the token index in the pages of each packed key."""
    t = call.tensors
    assert t.page_table is not None
    assert t.seqused_k is not None or t.cu_seqlens_k is not None
    page_size = t.k.shape[1]
    used = t.seqused_k if t.seqused_k is not None else t.cu_seqlens_k.diff()  # type: ignore[union-attr]
    bounds = torch.nn.functional.pad(used.long().cumsum(0), (1, 0))  # [B + 1]
    sequence = torch.repeat_interleave(torch.arange(len(used)), used.long())  # [T]
    position = torch.arange(int(bounds[-1])) - bounds[sequence]
    token = t.page_table.long()[sequence, position // page_size] * page_size + position % page_size
    k, v = (x.flatten(0, 1)[token] for x in (t.k, t.v))  # [T, Hkv, D]
    return call._replace(tensors=t._replace(k=k, v=v, cu_seqlens_k=bounds, seqused_k=None, page_table=None)), token


def scatter_to_pages(dx: Tensor | None, token: Tensor, like: Tensor) -> Tensor | None:
    """Add a gradient of packed keys into pages; sequences may share a page."""
    if dx is None:
        return None
    pages = dx.new_zeros((like.shape[0] * like.shape[1], *dx.shape[1:]))
    return pages.index_add_(0, token, dx).unflatten(0, like.shape[:2])
