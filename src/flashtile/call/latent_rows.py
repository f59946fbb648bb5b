"""Latent rows as DeepSeek packs them into 656 bytes: 512 numbers of 8 bits, four scales, 64 of 16 bits.

A scale multiplies 128 of the 512 numbers; the 64 are features that the position turns. Products are those of FlashMLA:
each number times its scale in float32, rounded to q's dtype.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .call import Call
from .device import host_readable
from .eight_bit import own_scales, quantize
from .problem import power_of_two

LATENT, ROPE, GROUP = 512, 64, 128  # features, and those that share a scale
FEATURES = LATENT + ROPE
SCALES = LATENT // GROUP
ROW_BYTES = LATENT + 4 * SCALES + 2 * ROPE
E4M3 = torch.float8_e4m3fn
WIDTHS = ROW_BYTES, FEATURES, LATENT  # as the cache, q and values have them
IN_WORDS = (
    f"uint8 (or float8_e4m3fn) rows of {ROW_BYTES} contiguous bytes under {FEATURES} features of q, with v_dim={LATENT}"
)


class Parts(NamedTuple):
    """Views of rows `[..., 656]`."""

    latent: Tensor  # float8_e4m3fn [..., 512]
    scales: Tensor  # float32 [..., 4]
    rope: Tensor  # bfloat16 [..., 64]


def is_packed(x: Tensor) -> bool:
    """Whether a cache has rows of bytes: no other has this dtype."""
    return x.dtype is torch.uint8


def parts_of(rows: Tensor) -> Parts:
    latent, scales, rope = rows.split((LATENT, 4 * SCALES, 2 * ROPE), -1)
    if rows.storage_offset() % 4 or any(n % 4 for n in rows.stride()[:-1]) or rows.stride(-1) != 1:
        scales, rope = scales.contiguous(), rope.contiguous()  # no view has words that begin elsewhere
    return Parts(latent.view(E4M3), scales.view(torch.float32), rope.view(torch.bfloat16))


def pack(x: Tensor) -> Tensor:
    """Rows `[..., 576]` as bytes `[..., 656]`. The largest of 128 numbers becomes 448; NaN stays NaN."""
    latent, rope = x.split((LATENT, ROPE), -1)
    groups = latent.unflatten(-1, (SCALES, GROUP))
    scales = own_scales(groups, E4M3)  # [..., 4]
    numbers = quantize(groups, scales[..., None], E4M3).flatten(-2)
    parts = numbers, scales, rope.to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def unpack(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of bytes `[..., 656]` as numbers `[..., 576]` of a dtype."""
    latent, scales, rope = parts_of(rows)
    numbers = latent.float().unflatten(-1, (SCALES, GROUP)) * scales[..., None]
    result = rows.new_empty((*rows.shape[:-1], FEATURES), dtype=dtype)
    result[..., :LATENT] = numbers.flatten(-2)
    result[..., LATENT:] = rope
    return result


def unpacked(call: Call) -> Call:
    """A call over pages of bytes as one over pages of q's dtype: a copy of the pages that its table names, or of all if
    those are fewer. Where lengths can be read, of no columns or rows behind the longest sequence.
    """
    t = call.tensors
    table, pages = t.page_table, t.k
    assert table is not None
    assert t.seqused_k is not None
    num_pages, page_size = pages.shape[:2]
    if host_readable(t.q):
        longest = int(t.seqused_k.max()) if t.seqused_k.numel() else 0
        rows = min(power_of_two(max(longest, 1)), page_size) if table.shape[1] == 1 else page_size
        pages, columns = pages[:, :rows], min(power_of_two(-(-longest // page_size)), table.shape[1])
    else:
        columns = table.shape[1]
    if table.shape[0] * columns < num_pages:
        exists = (table[:, :columns] >= 0) & (table[:, :columns] < num_pages)
        pages = pages[torch.where(exists, table[:, :columns], 0).long().flatten()]
        places = torch.arange(exists.numel(), dtype=torch.int32, device=table.device).view(exists.shape)
        table = torch.full(table.shape, -1, dtype=torch.int32, device=table.device)
        table[:, :columns] = torch.where(exists, places, -1)
    k = unpack(pages, t.q.dtype)
    return call._replace(tensors=t._replace(k=k, v=k[..., :LATENT], page_table=table))
