"""Balanced layouts: all rows have a rank, ranks have as many chunks, and about as many visible pairs."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import mask_mods
from flashtile.call.window import Window
from flashtile.distributed import Layout, Rates, balanced, simulate
from flashtile.distributed.balance import PRICE, visible_pairs
from flashtile.distributed.inputs import documents_of
from flashtile.distributed.layout import Piece, Placement
from flashtile.distributed.work import imbalance

LENGTH = 4096
OFFSETS = [0, *accumulate([700, 0, 3000, 41, 355])]
PREFIX = mask_mods.prefix(torch.tensor([1500]))
CALLS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (500, 0)},
    "chunks": {"attention_chunk": 900, "causal": True},
    "packed": {"cu_seqlens": OFFSETS, "causal": True},
    "prefix": {"mask": PREFIX},
}


def work_of(arguments: dict[str, Any]) -> Tensor:
    """The visible pairs of each row, by their definition."""
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    if arguments.get("causal"):
        seen &= j <= i
    if window := arguments.get("window"):
        seen &= (i - j <= window[0]) & (j - i <= window[1])
    if size := arguments.get("attention_chunk"):
        seen &= i // size == j // size
    if offsets := arguments.get("cu_seqlens"):
        ids = torch.bucketize(torch.arange(LENGTH), torch.tensor(offsets), right=True)
        seen &= ids[:, None] == ids
    if "mask" in arguments:
        seen &= (j <= i) | (j < 1500)
    return seen.sum(dim=1).double()


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", CALLS)
def test_ranks_have_as_many_rows_and_pairs(name: str, ranks: int) -> None:
    layout, work = balanced(ranks, LENGTH, **CALLS[name]), work_of(CALLS[name])
    pieces = sorted(piece for rank in range(ranks) for piece in layout.pieces(rank))
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == LENGTH
    rows = [layout.rows(rank) for rank in range(ranks)]
    assert max(rows) - min(rows) <= 4  # as many chunks, which differ by one row
    others = [imbalance(work, Layout(kind, LENGTH, ranks)) for kind in ("contiguous", "zigzag")]
    assert imbalance(work, layout) <= min(others) + PRICE
    assert imbalance(work, layout) <= 1.08 or name == "window"


def test_even_work_stays_in_one_piece() -> None:
    """Pieces are parts of their own in a ring, and neighbors are close for a window."""
    for arguments in ({}, {"window": (200, 0)}):
        assert balanced(4, LENGTH, **arguments).by_rank == tuple(
            (Piece(n * LENGTH // 4, (n + 1) * LENGTH // 4),) for n in range(4)
        )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", CALLS)
def test_one_piece_a_rank_has_as_many_pairs(name: str, ranks: int) -> None:
    """Short of those of a row, or of a block of a mask."""
    layout, work = balanced(ranks, LENGTH, **CALLS[name], contiguous=True), work_of(CALLS[name])
    pieces = [piece for (piece,) in layout.by_rank]
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == LENGTH
    assert imbalance(work, layout) <= (1.05 if name == "prefix" else 1.003)


def test_long_pieces_begin_with_a_block() -> None:
    layout = balanced(2, 2**15, window=(4095, 0), contiguous=True)
    assert layout.by_rank == ((Piece(0, 17408),), (Piece(17408, 2**15),))


def test_causal_work_is_that_of_zigzag() -> None:
    layout, zigzag = balanced(4, LENGTH, causal=True), Layout("zigzag", LENGTH, 4)
    assert Placement.of(layout) == Placement.of(zigzag)


@pytest.mark.parametrize("chunk", [1, 7, 500, 5000])
def test_chunks_of_a_given_size(chunk: int) -> None:
    layout = balanced(3, 50, causal=True, chunk=chunk)
    ends = {end for rank in range(3) for piece in layout.pieces(rank) for end in piece}
    assert all(end % chunk == 0 or end == 50 for end in ends)
    counts = [sum(-(-piece.length // chunk) for piece in layout.pieces(rank)) for rank in range(3)]
    assert max(counts) - min(counts) <= 1
    assert sum(map(layout.rows, range(3))) == 50


@pytest.mark.parametrize("name", CALLS)
def test_pairs_are_those_of_the_definition(name: str) -> None:
    arguments, expected = CALLS[name], work_of(CALLS[name])
    window = Window(None, 0) if arguments.get("causal") else Window(*arguments.get("window", (None, None)))
    window = window._replace(chunk=arguments.get("attention_chunk"))
    offsets, mask = arguments.get("cu_seqlens"), arguments.get("mask")
    documents = None if offsets is None else documents_of(offsets, None)
    visible = visible_pairs(LENGTH, LENGTH, window, mask, documents, 1, 1)
    error = (visible.of_rows() - expected).abs().max()
    assert error <= (128 if mask is not None else 0)  # a block of keys
    layout = Placement.of(balanced(3, LENGTH, **arguments))
    found = visible.of_ranks(layout, layout)
    assert found.sum().item() == pytest.approx(expected.sum().item(), rel=0.03)
    of_ranks = torch.stack([layout.select(expected, rank, 0).sum() for rank in range(3)])
    torch.testing.assert_close(found.sum(dim=1), of_ranks, rtol=0.03, atol=0.0)


def test_masks_count_by_sequence_and_head() -> None:
    """Lists of blocks, functions and tensors of the same mask, with a window."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.rand(2, 3, 8, 8, generator=generator) > 0.6
    lists = flashtile.BlockMask(
        blocks.sum(dim=3), blocks.to(torch.int8).argsort(dim=3, descending=True), block_size=(128, 128)
    )
    dense = blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)
    flex = pytest.importorskip("torch.nn.attention.flex_attention").create_block_mask(
        lambda b, h, i, j: blocks[b, h, i // 128, j // 128], 2, 3, 1024, 1024, device="cpu"
    )
    expected = dense.double().mean(dim=(0, 1)).sum(dim=1)
    for mask in (lists, dense, flex, lists.as_function()):
        found = visible_pairs(1024, 1024, Window(), mask, None, 2, 3).of_rows()
        torch.testing.assert_close(found, expected)
    causal = visible_pairs(1024, 1024, Window(None, 0), lists, None, 2, 3).of_rows()
    lower = torch.ones(8, 8).tril().bool().repeat_interleave(128, 0).repeat_interleave(128, 1)
    torch.testing.assert_close(causal, (dense & lower).double().mean(dim=(0, 1)).sum(dim=1))


def test_masks_of_packed_sequences_count_from_their_starts() -> None:
    offsets = [0, 300, 812]
    found = visible_pairs(812, 812, Window(), mask_mods.causal(), documents_of(offsets, None), 1, 1).of_rows()
    blocks = [128] * 128 + [256] * 128 + [300] * 44 + [128] * 128 + [256] * 128 + [384] * 128 + [512] * 128
    assert found.tolist() == blocks


def test_the_model_of_time_counts_documents_and_masks() -> None:
    fast, n = Rates(1e12, (1e30,), 0.0), 2**14
    causal = simulate("ring", (4,), rates=fast, seqlen=n)
    packed = simulate("ring", (4,), rates=fast, seqlen=n, layout="contiguous", cu_seqlens=[*range(0, n + 1, n // 4)])
    assert packed.flops == pytest.approx(causal.flops / 4, rel=0.01)
    mask = mask_mods.causal()
    assert simulate("ring", (4,), rates=fast, seqlen=n, causal=False, mask=mask).flops == pytest.approx(
        causal.flops, rel=0.01
    )
    offsets = [0, *accumulate([n // 2, *[n // 16] * 8])]
    arguments = {"rates": fast, "seqlen": n, "cu_seqlens": offsets}
    layout = balanced(4, n, causal=True, cu_seqlens=offsets)
    contiguous, even = (simulate("gather", (4,), layout=x, **arguments) for x in ("contiguous", layout))
    assert even.speedup == pytest.approx(4, rel=0.05)
    assert contiguous.speedup < 2.5


def untraced(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j if i.sum() else i < j


def test_what_is_refused() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mesh": 0}, "mesh"),
        ({"mesh": "two"}, "mesh"),
        ({"length": -1}, "length"),
        ({"chunk": 0}, "chunk"),
        ({"heads": 1.5}, "heads"),
        ({"cu_seqlens": [0, 60]}, "cu_seqlens"),
        ({"causal": "left"}, "causal"),
        ({"mask": untraced}, "cannot"),
        ({"mask": torch.ones(1, 1, 64, 60, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(1, 1, 64, 64, dtype=torch.bool), "cu_seqlens": [0, 64]}, "mask"),
        ({"mask": flashtile.BlockMask(torch.ones(1, 1, 2).int(), torch.ones(1, 1, 2, 2).int())}, "64 queries"),
    ]
    for given, words in wrong:
        with pytest.raises(flashtile.ArgumentError, match=words):
            balanced(**{"mesh": 2, "length": 64, **given})
    for layout in (
        Layout("balanced", 10, 2),
        Layout("balanced", 10, 2, ((Piece(0, 5),), (Piece(4, 10),))),
        Layout("balanced", 10, 2, ((Piece(6, 10), Piece(0, 3)), (Piece(3, 6),))),
        Layout("other", 10, 2),  # type: ignore[arg-type]
        balanced(3, 2**14),
        balanced(2, 2**13),
    ):
        with pytest.raises(flashtile.ArgumentError, match="layout"):
            simulate("ring", (2,), rates=Rates(1e12, (1e9,), 0.0), seqlen=2**14, layout=layout)
