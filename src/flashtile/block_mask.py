"""Masks from lists of blocks: which blocks of keys each block of queries sees."""

from collections.abc import Callable, Hashable
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from .errors import ArgumentError, describe
from .expression import MaskMod, mask_mod_function
from .expression.blocks import FULL, HIDDEN, PARTIAL

EXAMPLE = "flashtile.attention(q, k, v, mask=flashtile.BlockMask(kv_num_blocks, kv_indices, block_size=(128, 128)))"


class FlexBlockMask(Protocol):
    """The attributes of a `torch.nn.attention.flex_attention.BlockMask` that are read."""

    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Callable[..., Tensor]


class BlockMask(MaskMod):
    """A mask of listed blocks. Queries and keys are cut into blocks of `block_size` positions; each block of queries
    sees the blocks of keys in its list.

    It is a `flashtile.MaskMod`, so `flashtile.mask_mods.and_masks` and `or_masks` take it too. The names and shapes are
    as in `torch.nn.attention.flex_attention.BlockMask` (Dong et al., "Flex Attention", 2024, section 3.3), which the
    argument `mask` accepts as it is. The lists are read on their device when the mask is made; nothing is copied to the
    host.

    Example:
        >>> num_blocks, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
        >>> q, k, v = (torch.randn(1, 4, 64, 32) for _ in range(3))
        >>> mask = flashtile.BlockMask(num_blocks, indices, block_size=(32, 32))  # causal, in blocks
        >>> flashtile.attention(q, k, v, mask=mask).shape
        torch.Size([1, 4, 64, 32])

    Args:
        kv_num_blocks: integers `[B, Hq, blocks of queries]`, the first two may be 1: entries of each list.
        kv_indices: integers `[B, Hq, blocks of queries, blocks of keys]`: the numbers of blocks of keys.
        full_kv_num_blocks: the same for blocks in which `mask` is not applied; `None` if there are no such lists.
        full_kv_indices: with `full_kv_num_blocks`.
        block_size: positions of a block, of queries and of keys.
        mask: a mask function for the pairs in the blocks of `kv_indices`; `None` shows all of them.
        seqlens: the lengths of queries and keys that the lists are for. By default any that have as many blocks.

    Raises:
        ArgumentError: lists that are no integers or do not fit together, a block size below 1, or as `MaskMod`.
    """

    seqlens: tuple[int, int] | None = None
    block_size: tuple[int, int] = (128, 128)

    def __init__(
        self,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        *,
        block_size: tuple[int, int] = (128, 128),
        mask: MaskMod | Callable[..., Tensor] | None = None,
        seqlens: tuple[int, int] | None = None,
    ):
        if not all(isinstance(n, int) and n > 0 for n in block_size):
            raise ArgumentError("block_size", block_size, "two ints from 1", EXAMPLE)
        count = kv_indices.shape[-1] if seqlens is None else -(-seqlens[1] // block_size[1])
        states = listed(kv_num_blocks, kv_indices, count).to(torch.uint8) * (FULL if mask is None else PARTIAL)
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            full = listed(full_kv_num_blocks, full_kv_indices, count)
            if full.shape[2:] != states.shape[2:]:
                raise ArgumentError(
                    "full_kv_indices", full_kv_indices, "lists of as many blocks as kv_indices", EXAMPLE
                )
            states = torch.where(full, FULL, states)
        self.seqlens, self.block_size = seqlens, block_size
        inner = mask if mask is None or isinstance(mask, MaskMod) else MaskMod(mask)
        fn = function_of(block_size, states.shape, inner)
        super().__init__(fn, (states, *(() if inner is None else inner.tensors)))

    @classmethod
    def of_flex(cls, mask: FlexBlockMask) -> Self:
        """The same mask as a `torch.nn.attention.flex_attention.BlockMask`."""
        return cls(
            mask.kv_num_blocks,
            mask.kv_indices,
            mask.full_kv_num_blocks,
            mask.full_kv_indices,
            block_size=(mask.BLOCK_SIZE[0], mask.BLOCK_SIZE[1]),
            mask=mask.mask_mod,
            seqlens=getattr(mask, "seq_lengths", None),
        )

    def as_function(self) -> MaskMod:
        """The same mask as a function of positions, which also holds for a part of the rows and keys."""
        made = MaskMod.__new__(MaskMod)
        made.__dict__.update(self.__dict__)
        return made

    @classmethod
    def of_function(
        cls, key: str, tensors: tuple[Tensor, ...], block_size: tuple[int, int], seqlens: tuple[int, int] | None
    ) -> Self:
        """The inverse of `as_function`, by the key of the function."""
        made = cls.__new__(cls)
        made.fn, made.key, made.tensors = mask_mod_function(key), key, tensors
        made.block_size, made.seqlens = block_size, seqlens
        return made

    @property
    def call_key(self) -> Hashable:
        return self.key, self.block_size, self.seqlens

    def reject_lengths(self, example: str, seqlen_q: int, seqlen_k: int) -> None:
        """Refuse a call whose lengths differ from the lists'.

        Raises:
            ArgumentError: they are others.
        """
        blocks = tuple(self.tensors[0].shape[2:])
        wanted = (-(-seqlen_q // self.block_size[0]), -(-seqlen_k // self.block_size[1]))
        if self.seqlens not in (None, (seqlen_q, seqlen_k)) or blocks != wanted:
            own = (
                f"{self.seqlens[0]} x {self.seqlens[1]} positions"
                if self.seqlens
                else f"{blocks[0]} x {blocks[1]} blocks"
            )
            accepted = f"lists for {seqlen_q} queries and {seqlen_k} keys; these are for {own}"
            raise ArgumentError("mask", self, accepted, example)

    def reject_packed(self, example: str) -> None:
        """Refuse packed sequences, which have several lengths, if the lists are for one.

        Raises:
            ArgumentError: the lists have `seqlens`.
        """
        if self.seqlens is not None:
            accepted = "for sequences of different lengths, a mask function, or a flashtile.BlockMask without `seqlens`"
            raise ArgumentError("mask", self, accepted, example)

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Self:
        made = super().with_tensors(tensors)
        made.seqlens, made.block_size = self.seqlens, self.block_size
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        function, arguments = super().__reduce__()
        return (*(function, arguments), {"seqlens": self.seqlens, "block_size": self.block_size})


def listed(num_blocks: Tensor, indices: Tensor, count: int) -> Tensor:
    """Whether each of `count` blocks is in its list, `[B, H, blocks of queries, count]`."""
    for name, x, dims in (("kv_num_blocks", num_blocks, 3), ("kv_indices", indices, 4)):
        if not isinstance(x, Tensor) or x.is_floating_point() or x.dim() != dims:
            raise ArgumentError(name, x, f"a tensor of integers with {dims} dimensions", EXAMPLE)
    if num_blocks.shape != indices.shape[:3]:
        accepted = f"{list(indices.shape[:3])}, as kv_indices {describe(indices)} has lists"
        raise ArgumentError("kv_num_blocks", num_blocks, accepted, EXAMPLE)
    counts = torch.arange(indices.shape[3], device=indices.device) < num_blocks[..., None]
    inside = counts & (indices >= 0) & (indices < count)
    table = torch.zeros((*indices.shape[:3], count + 1), dtype=torch.bool, device=indices.device)
    return table.scatter_(3, torch.where(inside, indices, count).long(), True)[..., :count]


def function_of(block_size: tuple[int, int], shape: tuple[int, ...], mask: MaskMod | None) -> Callable[..., Tensor]:
    """The mask function of a table of blocks' states."""
    of_mask = None if mask is None else mask_mod_function(mask.current_key)

    def fn(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor, states: Tensor, *tensors: Tensor) -> Tensor:
        place = (b if shape[0] > 1 else 0, h if shape[1] > 1 else 0, q_idx // block_size[0], k_idx // block_size[1])
        state = states[place]
        if of_mask is None:
            return state != HIDDEN
        return (state == FULL) | ((state == PARTIAL) & of_mask(b, h, q_idx, k_idx, *tensors))

    return fn


def is_flex(value: Any) -> bool:
    """Whether a value is PyTorch's BlockMask, whose module is not imported for that."""
    return type(value).__name__ == "BlockMask" and type(value).__module__.startswith("torch.nn.attention.")
