"""Tokens that see only their own segment: padding, packed sequences and chunks as one packed call.

A batch of rows becomes one sequence of tokens, cut wherever the visible keys change as a whole. So no mask is read, and
fused kernels without a `mask` take the call.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .patterns import Pattern


class Segments(NamedTuple):
    """The segments of `[B, S]` tokens: consecutive ones, in the order of memory.

    Attributes:
        cu_seqlens: int32 `[N + 1]`, where segments begin.
        seqused_k: int32 `[N]`, their lengths, or 0 of padding; `None` without padding.
        longest: the longest segment's length.
    """

    cu_seqlens: Tensor
    seqused_k: Tensor | None
    longest: int


def segments_of(pattern: Pattern, batch: int, length: int, device: torch.device) -> Segments | None:
    """The segments of self-attention over `[batch, length]` tokens; `None` if visible keys are not consecutive.

    Values are read back: the number of segments decides a shape. Padding tokens are segments that see no key.
    """
    position = torch.arange(length, device=device).expand(batch, length)
    features, in_order = [torch.arange(batch, device=device)[:, None].expand(batch, length)], []
    if pattern.chunk is not None:
        size, begin = pattern.chunk
        features.append((position - begin.to(device)[:, None]) // size)
    if pattern.packed is not None:
        features.append(pattern.packed.to(device).expand(batch, length))
        in_order.append((features[-1].diff(dim=1) >= 0).all())
    if pattern.padding is not None:
        features.append(pattern.padding[:, :length])
        begins = features[-1].to(torch.int8).diff(dim=1, prepend=features[-1].new_zeros(batch, 1).to(torch.int8)) == 1
        in_order.append((begins.sum(1) <= 1).all())
    if not torch.stack(in_order).all() if in_order else False:
        return None
    tokens = torch.stack([x.flatten().long() for x in features])
    begins = (tokens.diff(dim=1) != 0).any(0).nonzero().flatten() + 1
    offsets = torch.cat([begins.new_zeros(1), begins, begins.new_full((1,), batch * length)])
    lengths = offsets.diff()
    used = None
    if pattern.padding is not None:
        used = torch.where(features[-1].flatten()[offsets[:-1]], lengths, 0).int()
    return Segments(offsets.int(), used, int(lengths.max()))
