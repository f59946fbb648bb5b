"""Visibility of the blocks of a mask that is a tensor, against its elements."""

import pytest
import torch
from no_reads import NoReads
from torch import Tensor

from flashtile.expression.blocks import coarser, dense, mask_visibility

SHAPES = [(1, 1, 64, 96), (2, 3, 61, 90), (2, 1, 61, 88), (1, 3, 1, 104), (2, 1, 70, 1), (1, 1, 1, 1), (1, 1, 5, 7)]


def mask_of(shape: tuple[int, ...], seed: int) -> Tensor:
    """A mask with blocks of 8 x 8 that are hidden, partly visible and full."""
    generator = torch.Generator().manual_seed(seed)
    batch, heads, rows, keys = shape
    kinds = torch.randint(0, 4, (batch, heads, -(-rows // 24), -(-keys // 24)), generator=generator)
    kinds = kinds.repeat_interleave(24, 2).repeat_interleave(24, 3)[:, :, :rows, :keys]
    return torch.where(kinds == 2, torch.rand(shape, generator=generator) < 0.9, kinds > 2)


def by_elements(mask: Tensor, rows: int, keys: int, block_m: int, block_n: int) -> Tensor:
    batch, heads, _, _ = mask.shape
    mask = mask.expand(batch, heads, rows, keys)
    states = torch.empty(batch, heads, -(-rows // block_m), -(-keys // block_n), dtype=torch.uint8)
    for m in range(states.shape[2]):
        for n in range(states.shape[3]):
            block = mask[:, :, m * block_m : (m + 1) * block_m, n * block_n : (n + 1) * block_n]
            states[:, :, m, n] = block.any(3).any(2).to(torch.uint8) + block.all(3).all(2)
    return states


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_states_of_blocks(shape: tuple[int, int, int, int]) -> None:
    """Broadcast dimensions and lengths that no block divides; and masks that do not lie in words of eight elements."""
    rows, keys = (n if n > 1 else 50 for n in shape[2:])
    wide = mask_of((*shape[:3], shape[3] + 8), 1)
    masks = [mask_of(shape, 0), mask_of((*shape[:2], *reversed(shape[2:])), 2).mT, wide[..., 8:], wide[..., 3:-5]]
    for mask in masks:
        for sizes in ((16, 24), (64, 128), (7, 5), (8, 8)):
            found = mask_visibility(mask, rows, keys, *sizes)
            assert torch.equal(found, by_elements(mask, rows, keys, *sizes))
        found = coarser(mask_visibility(mask, rows, keys, 8, 8), 2, 3)
        assert torch.equal(found, by_elements(mask, rows, keys, 16, 24))


def test_expanded_dimensions_are_read_once() -> None:
    mask = mask_of((2, 1, 1, 88), 0).expand(2, 3, 61, 88)
    assert dense.unexpanded(mask).shape == (2, 1, 1, 88)
    found = mask_visibility(mask, 61, 88, 16, 24)
    assert found.shape == (2, 1, 4, 4)
    assert torch.equal(found.expand(2, 3, 4, 4), by_elements(mask, 61, 88, 16, 24))


def test_words_of_eight_elements() -> None:
    """Where rows are multiples of eight, and only there."""
    mask = mask_of((2, 1, 64, 104), 0)
    assert dense.as_words(mask, 64).dtype is torch.int64
    assert dense.as_words(mask[..., 8:], 64).dtype is torch.int64
    for other, block_n in ((mask[..., 4:], 64), (mask[..., 1:97], 64), (mask, 60), (mask.mT, 64), (mask[..., ::2], 8)):
        assert dense.as_words(other, block_n).dtype is torch.uint8


def test_the_host_reads_nothing() -> None:
    mask = mask_of((2, 3, 61, 88), 0)
    with NoReads():
        mask_visibility(mask, 61, 88, 16, 32)
