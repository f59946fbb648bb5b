"""Masks of listed blocks: PyTorch's, and our own."""

import copy
import pickle
from typing import Any

import pytest
import torch
from checking import BACKENDS, offsets, tile_size
from no_reads import NoReads
from torch import Tensor
from torch.nn.attention import flex_attention

import flashtile
from flashtile import ArgumentError, BlockMask, mask_mods
from flashtile.expression import Formula, mask_mod_formula
from flashtile.expression.blocks import Blocks, block_visibility, positions

SQ, SK = 77, 101
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V, DOUT = (torch.randn(2, 4, n, 16, generator=GENERATOR) for n in (SQ, SK, SK, SQ))
LENGTHS = torch.tensor([70, 30])


def of_flex(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return (k_idx < LENGTHS[b]) & ((q_idx - k_idx).abs() < 12 + 20 * h)


def created(fn: Any, batch: int | None, heads: int | None, size: tuple[int, int] = (16, 24)) -> Any:
    return flex_attention.create_block_mask(fn, batch, heads, SQ, SK, device="cpu", BLOCK_SIZE=size)


def results(mask: Any, backend: str) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    with tile_size(16, 24):
        out = flashtile.attention(*leaves, mask=mask, backend=backend)
        return [out.detach(), *torch.autograd.grad(out, leaves, DOUT)]


def bottom_right(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
    return k_idx <= q_idx + 24


def shown(fn: Any) -> Tensor:
    """The visible pairs of a function, `[2, 4, SQ, SK]`."""
    b, h = torch.arange(2)[:, None, None, None], torch.arange(4)[:, None, None]
    return fn(b, h, torch.arange(SQ)[:, None], torch.arange(SK)).expand(2, 4, SQ, SK)


@pytest.mark.parametrize("backend", ["cpu", *BACKENDS])
def test_pytorch_s(backend: str) -> None:
    """The same results and gradients as of the pairs that it shows; tiles need not divide its blocks."""
    sizes = ((16, 24), (32, 40)) if backend == "tiled" else ((32, 40),)
    for fn, batch, heads in ((of_flex, 2, 4), (bottom_right, None, None))[: 1 if backend == "cpu" else 2]:
        for size in sizes:
            for x, y in zip(
                results(created(fn, batch, heads, size), backend), results(shown(fn), backend), strict=True
            ):
                torch.testing.assert_close(x, y)


def test_its_function_counts_in_partial_blocks_alone() -> None:
    counts, places = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[1, 0], [0, 1], [0, 1]]]])
    full_counts, full_places = torch.tensor([[[1, 1, 0]]]), torch.tensor([[[[0, 1], [1, 0], [1, 0]]]])
    flex = flex_attention.BlockMask.from_kv_blocks(
        counts, places, full_counts, full_places, BLOCK_SIZE=(32, 64), mask_mod=lambda b, h, i, j: j % 2 == 0,
        seq_lengths=(SQ, SK),
    )  # fmt: skip
    states = torch.tensor([[2, 1], [0, 2], [1, 0]])  # of blocks: hidden, partial, full
    state = states[(torch.arange(SQ) // 32)[:, None], torch.arange(SK) // 64]
    visible = (state == 2) | ((state == 1) & (torch.arange(SK) % 2 == 0))
    for x, y in zip(results(flex, "cpu"), results(visible[None, None], "cpu"), strict=True):
        torch.testing.assert_close(x, y)


def listed(blocks: Tensor, **keywords: Any) -> BlockMask:
    """The mask of a table of blocks `[B, H, M, N]`."""
    return BlockMask(blocks.sum(3), blocks.int().argsort(dim=3, descending=True, stable=True), **keywords)


def test_lists_are_exact_blocks() -> None:
    """The states of blocks are those of the lists; what is listed behind the counts is not read."""
    blocks = torch.rand(2, 1, 5, 5, generator=GENERATOR) < 0.5
    mask = listed(blocks, block_size=(16, 24))
    formula = mask_mod_formula(mask.key)
    assert isinstance(formula, Formula)
    places = [positions(0, 5 * n, n, torch.device("cpu")) for n in mask.block_size]
    found = block_visibility(formula, mask.tensors, Blocks(torch.arange(2), torch.arange(3), *places), torch.float32)
    assert torch.equal(found, 2 * blocks.to(torch.uint8))
    for copied in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask)), copy.copy(mask)):
        assert (copied.key, copied.block_size, copied.seqlens) == (mask.key, mask.block_size, mask.seqlens)


def test_with_other_masks() -> None:
    blocks = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask = mask_mods.and_masks(listed(blocks, block_size=(16, 24)), mask_mods.document(torch.arange(SK) // 30))
    rows, keys = torch.arange(SQ)[:, None], torch.arange(SK)
    visible = (rows // 16 >= keys // 24) & (rows // 30 == keys // 30)
    for x, y in zip(results(mask, "cpu"), results(visible[None, None], "cpu"), strict=True):
        torch.testing.assert_close(x, y)


def test_the_host_reads_no_list() -> None:
    flex = created(of_flex, 2, 4)
    with NoReads():
        BlockMask.of_flex(flex)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": Q[:, :, :-1]}, "these are for 77 x 101 positions"),
        ({"k": K[:, :, :90], "v": V[:, :, :90]}, "lists for 77 queries and 90 keys"),
        ({"mask": listed(torch.ones(1, 1, 5, 4, dtype=torch.bool), block_size=(16, 24))}, "these are for 5 x 4 blocks"),
    ],
)
def test_other_lengths_are_refused(arguments: dict[str, Any], message: str) -> None:
    arguments = {"q": Q, "k": K, "v": V, "mask": created(of_flex, 2, 4)} | arguments
    with pytest.raises(ArgumentError, match=message):
        flashtile.attention(**arguments)


def test_refused() -> None:
    packed = [x[0].transpose(0, 1) for x in (Q, K, V)]
    mask, cu = created(of_flex, 2, 4), (offsets(40, 37), offsets(51, 50))
    with pytest.raises(ArgumentError, match="sequences of different lengths"):
        flashtile.attention_varlen(packed[0], packed[1], packed[2], *cu, mask=mask)
    counts, places = torch.ones(1, 1, 2, dtype=torch.int32), torch.zeros(1, 1, 2, 2, dtype=torch.int32)
    for arguments in ((counts.float(), places), (counts[0], places), (counts[:, :, :1], places)):
        with pytest.raises(ArgumentError, match="kv_num_blocks"):
            BlockMask(*arguments)
    with pytest.raises(ArgumentError, match="full_kv_indices"):
        BlockMask(counts, places, counts[:, :, :1], places[:, :, :1])
    with pytest.raises(ArgumentError, match="block_size"):
        BlockMask(counts, places, block_size=(0, 4))
