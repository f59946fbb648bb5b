"""Tiles that a mask function hides or shows in full, in torch operations."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from checking import assert_right, dense_case, lengths_on_the_device, offsets, tile_size
from no_reads import NoReads
from ready_masks import assert_ready_masks
from torch import Tensor

import flashtile
from flashtile import mask_mods
from flashtile.backend.blockwise import scores
from flashtile.testing.case import Case, MaskFunction

IDS = torch.arange(40) // 16


def by_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor, ids: Tensor, width: Tensor) -> Tensor:
    return (ids[b, i] == ids[b, j]) & ((i - j).abs() <= width[h])


MASK = MaskFunction(by_document, (torch.stack([IDS, IDS.roll(9)]), torch.tensor([100, 3])))


def num_mask_calls(call: Callable[[], object]) -> int:
    """The number of tiles for which a call computes a mask."""
    with mock.patch.object(scores, "call_mask_mod", wraps=scores.call_mask_mod) as counted:
        call()
    return counted.call_count


def test_ready_masks() -> None:
    with tile_size(5, 7, scores=600):
        assert_ready_masks("tiled")


def test_layouts() -> None:
    with tile_size(8, 8, scores=64):
        assert_right(dense_case(seqlen_q=33, seqlen_k=40, mask=MASK, window=(25, 5)), "tiled")
        q, k, v, dout = (torch.randn(n, h, 16) for n, h in ((50, 2), (61, 1), (61, 1), (50, 2)))
        arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets(19, 31), "cu_seqlens_k": offsets(40, 21)}
        case = Case("attention_varlen", arguments | {"mask": MASK}, dout)
        assert_right(case, "tiled")
        with lengths_on_the_device():
            assert_right(case, "tiled")


def test_hidden_tiles_are_skipped_and_full_ones_not_masked() -> None:
    q = torch.randn(1, 1, 40, 8)
    with tile_size(8, 8):
        calls = {
            n: num_mask_calls(
                lambda ids=ids: flashtile.attention(q, q, q, mask=mask_mods.document(ids), backend="tiled")
            )
            for n, ids in ((0, IDS), (12, torch.arange(40) // 12))
        }
        poisoned = torch.where(IDS[:, None] == 1, torch.nan, q)
        out = flashtile.attention(poisoned, poisoned, poisoned, mask=mask_mods.document(IDS), backend="tiled")
    assert calls == {0: 0, 12: 8}  # of 25
    assert torch.equal(out.isnan()[0, 0, :, 0], IDS == 1)


@pytest.mark.parametrize("derivative", ["jvp", "vmap over the mask's tensor", "second"])
def test_transforms(derivative: str) -> None:
    """The same results with small tiles as with one, under transforms."""
    q, k, v, tangent = torch.randn(4, 1, 2, 40, 8).double()
    ids = torch.stack([IDS, IDS.roll(9)])

    def attend(q: Tensor, ids: Tensor = IDS) -> Tensor:
        return flashtile.attention(q, k, v, mask=mask_mods.document(ids), backend="tiled").square()

    def result() -> Tensor:
        if derivative == "jvp":
            return torch.func.jvp(attend, (q,), (tangent,))[1]
        if derivative == "second":
            return torch.func.grad(lambda q: torch.func.grad(lambda q: attend(q).sum())(q).square().sum())(q)
        return torch.func.vmap(lambda ids: attend(q, ids))(ids)

    expected = result()
    with tile_size(8, 8):
        torch.testing.assert_close(result(), expected)


def test_the_host_reads_nothing_of_a_device() -> None:
    q = torch.randn(1, 1, 40, 8)
    with tile_size(8, 8), mock.patch("flashtile.call.device.host_readable", return_value=False):
        mask = mask_mods.document(IDS)
        with NoReads():
            flashtile.attention(q, q, q, mask=mask, backend="tiled")
