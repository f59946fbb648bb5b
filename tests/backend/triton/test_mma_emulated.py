"""The kernels of mma.sync without a GPU: `gluon_emulation` runs them."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

from gluon_emulation.mma_backend import emulated
from listed_masks import documents, earlier
from mma_cases import (
    BOTH,
    CASES,
    LARGE,
    SMALL,
    SMALL_TWO,
    TILES,
    WIDE,
    WIDE_BOTH,
    WIDE_FORWARD,
    WIDE_TILES,
    dense,
    made,
    tile_of,
    wide,
    wrong,
)

import flashtile
from flashtile.backend.gpu import block_lists
from flashtile.backend.triton.kernels.sequences import in_turns
from flashtile.backend.triton.tile_config import TileConfig
from flashtile.testing.case import MaskFunction
from flashtile.testing.oracle import solve
from flashtile.testing.poison import in_larger_buffer, poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.repeat_interleave(torch.arange(5), torch.tensor([9, 17, 2, 20, 3]))


@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_bound(name: str) -> None:
    assert wrong(made(name), TILES[sum(name.encode()) % len(TILES)]) == []


@pytest.mark.parametrize("name", [*WIDE, "packed"])
def test_wide_heads(name: str) -> None:
    assert wrong(wide(name), WIDE_TILES[len(name) % len(WIDE_TILES)], kernels=WIDE_BOTH) == []


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_slots_of_chunks(stages: int) -> None:
    """Chunks of six blocks, which no number of slots divides but two and three."""
    case = replace(dense(20, 90, head_dim=296, head_dim_v=384, causal=True), forward_only=True)
    assert wrong(case, tile_of(16, 16, stages)._replace(one_loop=None), kernels=WIDE_FORWARD) == []


def test_lists_of_blocks_of_wide_heads() -> None:
    case = dense(45, 50, head_dim=264, mask=MaskFunction(documents, (IDS,)))
    with mock.patch.object(block_lists, "LEAST_PAIRS", 0):
        assert wrong(case, WIDE_TILES[0], kernels=WIDE_BOTH) == []


def test_rows_whose_scores_are_all_low() -> None:
    """A key that does not exist has score 0, and would have an infinite probability."""
    case = dense(20, 21)
    q, k = (torch.full_like(case.arguments[name], x) for name, x in (("q", -9.0), ("k", 8.0)))
    case = replace(case, arguments=case.arguments | {"q": q, "k": k})
    assert wrong(case, SMALL) == []


@pytest.mark.parametrize(("tiles", "heads", "at_once"), [(5, 6, 3), (7, 16, 16), (1, 4, 2), (3, 5, 1)])
def test_groups_of_heads_take_turns(tiles: int, heads: int, at_once: int) -> None:
    """A group's first blocks, then its second blocks, and each block of each head once."""
    order = [divmod(in_turns.fn(n, tiles, at_once), tiles) for n in range(tiles * heads)]
    groups = range(0, heads, at_once)
    assert order == [(head + n, tile) for head in groups for tile in range(tiles) for n in range(at_once)]
    assert [in_turns.fn(n, tiles, None) for n in range(9)] == list(range(9))


@pytest.mark.parametrize("tile", [SMALL_TWO, LARGE], ids=["16 x 16", "32 x 16"])
@pytest.mark.parametrize("mask", ["function", "causal function", "tensor"])
def test_lists_of_blocks(mask: str, tile: TileConfig) -> None:
    """Blocks are visited by their lists, those that need masks first."""
    given: dict[str, Any] = {"mask": MaskFunction(documents, (IDS,))}
    if mask == "causal function":
        given = {"mask": MaskFunction(earlier, (torch.tensor(0),)), "window": (25, None)}
    if mask == "tensor":
        given["mask"] = (IDS[:, None] == IDS)[None, None, :45, :50].contiguous()
    with (
        mock.patch.object(block_lists, "LEAST_PAIRS", 0),
        mock.patch.object(block_lists, "listed", wraps=block_lists.listed) as lists,
    ):
        assert wrong(dense(45, 50, **given), tile) == []
    assert [x.args[2] for x in lists.call_args_list] == [False, True]


def test_lists_of_a_mask_summarized_once() -> None:
    mask = torch.ones(1, 1, 140, 130, dtype=torch.bool).tril(-20)
    with (
        mock.patch.object(block_lists, "LEAST_PAIRS", 0),
        mock.patch.object(block_lists, "states_of_mask", wraps=block_lists.states_of_mask) as summaries,
    ):
        assert wrong(dense(140, 130, num_heads_q=1, num_heads_kv=1, mask=mask), tile_of(64, 64, 1)) == []
    assert summaries.call_count == 1


@pytest.mark.parametrize("apart", [1, 8])
def test_rows_of_the_gradient_apart(apart: int) -> None:
    """Rows that no copy of 16 bytes can read are copied first."""
    case = dense(causal=True)
    assert case.dout is not None
    case = replace(case, dout=in_larger_buffer(case.dout, ((0, 0), (0, 0), (0, 0), (0, apart))))
    assert wrong(case, SMALL) == []


def test_a_scalar_gradient() -> None:
    """Its strides are all 0."""
    case = dense()
    assert case.dout is not None
    assert wrong(replace(case, dout=torch.ones((), dtype=torch.float16).expand(case.dout.shape)), SMALL) == []


@pytest.mark.parametrize("without", ["dout", "dlse"])
def test_one_result_has_a_gradient(without: str) -> None:
    assert wrong(replace(dense(causal=True), **{without: None}), SMALL_TWO) == []


@pytest.mark.parametrize("first", [0, 1])
def test_an_output_that_is_given(first: int) -> None:
    """Also one that is not aligned."""
    case = dense()
    q, k, v = (case.arguments[name] for name in "qkv")
    out = torch.full((q.numel() + 8,), torch.nan, dtype=q.dtype)[first : first + q.numel()].view(q.shape)
    with emulated(SMALL) as launched:
        flashtile.attention(q, k, v, out=out, backend="triton")
    assert launched == ["mma.forward"]
    expected = flashtile.attention(q, k, v, backend="reference")
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)


def test_a_stride_that_no_address_depends_on() -> None:
    """Of one sequence, which is no multiple of a vector."""
    case = dense(causal=True)
    q = case.arguments["q"][:1]
    one = {name: x[:1] for name, x in case.arguments.items() if name in "qkv"}
    one["q"] = q.contiguous().as_strided(q.shape, (q.numel() + 1, *q.contiguous().stride()[1:]))
    with emulated(SMALL) as launched:
        found = flashtile.attention(**one, causal=True, backend="triton")
    assert launched == ["mma.forward"]
    expected = flashtile.attention(**one, causal=True, backend="reference")
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_rows_that_no_copy_can_read(name: str) -> None:
    """Another kernel reads them."""
    case = replace(dense(causal=True), forward_only=True)
    apart = in_larger_buffer(case.arguments[name], ((0, 0), (0, 0), (0, 0), (1, 0)))
    case = replace(case, arguments=case.arguments | {name: apart})
    assert wrong(case, SMALL, kernels=["forward"]) == []


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_replay_on_other_tensors(name: str) -> None:
    """A replayed call of the same layout begins with empty sums of dq."""
    case = made(name)
    flipped = {x: case.arguments[x].flip(-1).contiguous() for x in "qk"}
    other = replace(case, arguments=case.arguments | flipped)
    unread = mock.patch("flashtile.call.device.host_readable", return_value=False)  # lengths, as on a GPU
    with emulated(SMALL) as launched, unread, poisoned_allocation():
        for _ in range(2):  # planned, then recorded
            case.run("triton")
        results = other.run("triton")
    assert launched == 3 * BOTH
    assert [str(x) for x in compare(results, other, solve(other)) if not x.ok] == []


def test_only_dq_depends_on_the_order_of_events() -> None:
    case = dense(64, 64, num_heads_q=1, num_heads_kv=1)

    def results(seed: int) -> dict[str, Tensor]:
        with emulated(SMALL, seed):
            return case.run("triton")

    first, *others = (results(seed) for seed in (0, 20, 40))
    assert all(torch.equal(x[name], first[name]) for x in others for name in ("out", "lse", "dk", "dv"))
