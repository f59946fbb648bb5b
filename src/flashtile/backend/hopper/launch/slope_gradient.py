"""The gradient of ALiBi slopes from the parts that the threads of the fused backward kernel add up."""

import torch
from torch import Tensor

from ..tile_config import NUM_WARPGROUPS, SLOPE_PARTS


def slope_parts_shape(heads: int, n_blocks: int) -> tuple[int, ...]:
    return heads, n_blocks, NUM_WARPGROUPS * SLOPE_PARTS


def new_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return like.new_zeros(shape, dtype=torch.float32)


def add_slope_parts(batch: int, block_n: int, slopes: Tensor, parts: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    """The gradient of slopes `[H]` or `[B, H]` from parts `[splits * B * H, blocks, ...]`, or if packed `[H, ...]`."""
    heads = slopes.shape[-1]
    by_block = parts.sum(dim=-1)
    if cu_seqlens_k is None:
        by_sequence = by_block.view(-1, batch, heads, by_block.shape[-1]).sum(dim=(0, 3))
        return by_sequence if slopes.dim() == 2 else by_sequence.sum(dim=0)
    if slopes.dim() == 1:
        return by_block.sum(dim=-1)
    # Each sequence begins with a block of its own, and tokens outside of all count as one more.
    first = cu_seqlens_k // block_n + torch.arange(batch + 1, device=parts.device)
    block = torch.arange(by_block.shape[-1], device=parts.device)
    sequence = torch.searchsorted(first, block, right=True) - 1
    total = parts.new_zeros(batch + 1, heads)
    return total.index_put_((sequence,), by_block.t(), accumulate=True)[:-1]  # sorted, hence deterministic
