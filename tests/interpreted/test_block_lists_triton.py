"""Kernels that visit the blocks in a list of a mask function's blocks, in Triton's interpreter."""

import importlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from checking import dense_case
from listed_masks import near_in_documents

from flashtile.dispatch import fast_path
from flashtile.expression import Formula, MaskMod, mask_mod_formula
from flashtile.expression.blocks import FULL, HIDDEN, PARTIAL
from flashtile.testing.case import MaskFunction
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.tolerance import compare

block_lists = importlib.import_module("flashtile.backend.gpu.block_lists")
IN_INTERPRETER = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")


@pytest.fixture(autouse=True)
def lists_for_all_calls() -> Iterator[None]:
    fast_path.forget()
    with mock.patch.object(block_lists, "LEAST_PAIRS", 0):
        yield
    fast_path.forget()


def mask_of(*widths: int, length: int = 400) -> MaskFunction:
    ids = torch.stack([torch.arange(length) // n for n in (64, 61)])
    return MaskFunction(near_in_documents, (ids, torch.tensor(widths)))


@IN_INTERPRETER
def test_tangents() -> None:
    """Of the same blocks."""
    case = moving(dense_case(head_dim=16, mask=mask_of(1000, 40, 0, 3), seqlen_q=100, seqlen_k=150, batch=1))
    assert [str(x) for x in compare(case.run("triton"), case, solve(case)) if not x.ok] == []


@IN_INTERPRETER
@pytest.mark.parametrize(
    "arguments",
    [
        {"seqlen_q": 130, "seqlen_k": 200, "batch": 1},
        {
            "num_heads_q": 1,
            "dropout_p": 0.3,
            "dropout_seed": 3,
            "alibi_slopes": torch.tensor([0.2]),
            "seqlen_q": 70,
            "seqlen_k": 70,
        },
        {"seqlen_q": 100, "seqlen_k": 150, "window": (60, 30)},
        {"seqlen_q": 100, "seqlen_k": 150, "num_heads_q": 1, "batch": 1, "causal": "top_left"},
    ],
    ids=["heads", "with others", "window", "top-left causal"],
)
def test_results(arguments: dict[str, Any]) -> None:
    """Hidden, partly visible and full blocks, lists of sequences and of heads, lengths that no block divides;
    forward and gradients.
    """
    case = dense_case(**{"head_dim": 16, "mask": mask_of(1000, 40, 0, 3)} | arguments)
    with mock.patch.object(block_lists, "computed", wraps=block_lists.computed) as computed:
        worst = compare(case.run("triton"), case, solve(case))[0]
    assert worst.ok, f"{worst}\n{case.description}"
    assert computed.call_count >= 3  # forward, dq, dk and dv


@IN_INTERPRETER
@pytest.mark.parametrize("shape", [(1, 2, 70, 200), (2, 1, 1, 200)], ids=str)
def test_results_of_a_mask_that_is_a_tensor(shape: tuple[int, ...]) -> None:
    """Documents in which some pairs are hidden, padding, and rows without a key; forward and gradients."""
    generator = torch.Generator().manual_seed(0)
    i, j = torch.arange(shape[2])[:, None], torch.arange(shape[3])
    near = (i // 30 == j // 80) if shape[2] > 1 else j < 77
    mask = near & ((torch.rand(shape, generator=generator) < 0.97) | (j < 64))
    case = dense_case(batch=shape[0], num_heads_q=shape[1], head_dim=16, seqlen_q=70, seqlen_k=200, mask=mask)
    small = mock.patch.object(block_lists, "SUMMARY_BLOCK", 16)  # as the interpreter's blocks
    with small, mock.patch.object(block_lists, "mask_visibility", wraps=block_lists.mask_visibility) as read:
        worst = compare(case.run("triton"), case, solve(case))[0]
    assert worst.ok, f"{worst}\n{case.description}"
    assert read.call_count == 1  # for forward, dq, dk and dv


@IN_INTERPRETER
def test_full_blocks_do_not_read_the_mask() -> None:
    """A mask whose lists say that all its blocks are full, although it hides pairs: they stay visible."""
    mask = torch.rand((1, 1, 128, 128), generator=torch.Generator().manual_seed(0)) < 0.5
    case = dense_case(num_heads_q=1, batch=1, seqlen_q=128, seqlen_k=128, head_dim=16, mask=mask)
    with mock.patch.object(block_lists, "mask_visibility", side_effect=all_full):
        results = case.run("triton")
    del case.arguments["mask"]
    worst = compare(results, case, solve(case))[0]
    assert worst.ok, worst


def all_full(mask: torch.Tensor, num_rows: int, num_keys: int, block_m: int, block_n: int) -> torch.Tensor:
    return torch.full((1, 1, -(-num_rows // block_m), -(-num_keys // block_n)), FULL, dtype=torch.uint8)


@IN_INTERPRETER
def test_nothing_is_read_of_hidden_blocks() -> None:
    """NaN in keys and values of hidden blocks."""
    ids = torch.arange(256) // 128
    mask = MaskFunction(lambda b, h, i, j, ids: ids[i] == ids[j], (ids,))
    case = dense_case(batch=1, num_heads_q=1, seqlen_q=256, seqlen_k=256, head_dim=16, mask=mask, forward_only=True)
    for name in ("k", "v"):
        case.arguments[name][:, :, 128:] = torch.nan
    out = case.run("triton")["out"]
    assert torch.equal(out[0, 0].isnan().any(1), ids == 1)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("lengths", [(96, 128), (90, 100)])
def test_lists(of_keys: bool, lengths: tuple[int, int]) -> None:
    """Each block is once in the list for its state; those with positions that do not exist never count as full."""
    mod = MaskMod(near_in_documents, mask_of(1000, 20).tensors)
    formula, sizes = mask_mod_formula(mod.key), (16, 32)
    assert isinstance(formula, Formula)
    window = block_lists.Sides(None, None, None, 0)
    pairs = block_lists.Pairs(*(block_lists.Range(0, n) for n in (2, 2, *lengths)), *sizes, window)
    found = block_lists.computed(formula, pairs, torch.device("cpu"), of_keys, *mod.tensors)
    i, j = (torch.arange(-(-n // size) * size) for n, size in zip(lengths, sizes, strict=True))
    b, h = torch.arange(2)[:, None, None, None], torch.arange(2)[:, None, None]
    exists = (i[:, None] < lengths[0]) & (j < lengths[1])
    visible = mod.fn(b, h, i[:, None], j, *mod.tensors) & exists
    ragged = ~exists.any(1, keepdim=True) if of_keys else ~exists.any(0)
    blocks = [x.expand_as(visible).unflatten(3, (-1, 32)).unflatten(2, (-1, 16)) for x in (visible, ~exists, ragged)]
    some, full = blocks[0].any(5).any(3), (blocks[0] | blocks[1]).all(5).all(3) & ~blocks[2].any(5).any(3)
    if of_keys:
        some, full = some.mT, full.mT
    for entries, own_some, own_full in zip(found.flatten(0, 2), some.flatten(0, 2), full.flatten(0, 2), strict=True):
        partial, whole, *order = entries.tolist()
        assert sorted(order) == list(range(len(own_some)))
        full_blocks = (own_full & own_some).nonzero().flatten().tolist()
        assert sorted(order[partial : partial + whole]) == full_blocks
        assert sorted(order[:partial]) == [n for n in own_some.nonzero().flatten().tolist() if n not in full_blocks]


@pytest.mark.parametrize("lengths", [(70, 100), (100, 70), (64, 96)])
@pytest.mark.parametrize(
    "sides", [(None, 0, None), (20, 5, None), (-3, 40, None), (None, None, 0), (33, None, -7), (None, -200, None)]
)
def test_windows_decide_blocks_exactly(
    lengths: tuple[int, int], sides: tuple[int | None, int | None, int | None]
) -> None:
    """Against all pairs that exist, of a whole call and of a part with another diagonal."""
    rows, keys = lengths
    for diagonal in (0, 13):
        shift = keys - rows + diagonal
        ranges = [block_lists.Range(0, n) for n in (1, 1, *lengths)]
        pairs = block_lists.Pairs(*ranges, 16, 32, block_lists.Sides(*sides, shift))
        i, j = torch.arange(rows)[:, None], torch.arange(keys)
        left, right, top_left = sides
        visible = torch.ones(rows, keys, dtype=torch.bool)
        visible &= j >= i + shift - (left if left is not None else 1000)
        visible &= j <= i + shift + (right if right is not None else 1000)
        visible &= j <= i + (top_left if top_left is not None else 1000)
        found = block_lists.window_states(pairs, torch.device("cpu"))
        for m, of_rows in enumerate(visible.split(16)):
            for n, block in enumerate(of_rows.split(32, dim=1)):
                if found[m, n] == PARTIAL and left is not None and top_left is not None:
                    continue  # sides with other diagonals: pairs within each may be in no common place
                assert found[m, n] == (FULL if block.all() else PARTIAL if block.any() else HIDDEN), (m, n)
