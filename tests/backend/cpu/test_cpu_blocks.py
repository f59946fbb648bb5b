"""Blocks of pairs that a mask function hides or shows in full, in the CPU kernels."""

import importlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from checking import assert_right, dense_case, offsets
from listed_masks import near_in_documents
from ready_masks import assert_ready_masks
from torch import Tensor

import flashtile
from flashtile import MaskMod
from flashtile.dispatch import fast_path
from flashtile.expression.blocks import FULL, HIDDEN, PARTIAL
from flashtile.testing.case import Case, MaskFunction, ScoreFunction
from flashtile.testing.score_functions import tempered_table

blocks = importlib.import_module("flashtile.backend.cpu.blocks")
tables = importlib.import_module("flashtile.backend.cpu.tables")


@pytest.fixture(autouse=True)
def tables_for_all_calls() -> Iterator[None]:
    fast_path.forget()
    with mock.patch.object(blocks, "LEAST_WORK", 0):
        yield
    fast_path.forget()


def mask_of(length: int, *widths: int) -> MaskFunction:
    """Documents of 150 positions in one sequence, and of 61 in the other, with a distance for each head."""
    ids = torch.stack([torch.arange(length) // n for n in (150, 61)])
    return MaskFunction(near_in_documents, (ids, torch.tensor(widths)))


def by_document(ids: Tensor) -> MaskMod:
    """The mask of one sequence's documents, by the function that other tests have compiled."""
    return MaskMod(near_in_documents, (ids[None], torch.tensor([10**6])))


def test_ready_masks() -> None:
    assert_ready_masks("cpu")


@pytest.mark.parametrize(
    "sizes",
    [
        {"seqlen_q": 333, "seqlen_k": 301},
        {"num_heads_q": 6, "num_heads_kv": 2, "seqlen_q": 101, "seqlen_k": 333},
        {"num_heads_q": 1, "batch": 1, "seqlen_q": 1400, "seqlen_k": 1900},
        {"num_heads_q": 2, "seqlen_q": 2, "seqlen_k": 1700, "num_splits": 3},
    ],
    ids=["two heads a panel", "heads across panels", "sums with totals", "decode"],
)
def test_sizes(sizes: dict[str, Any]) -> None:
    """Panels with rows of several heads and positions, of which some see a block and some do not."""
    widths = (10**6, 40, 0, 3, 2, 4)[: sizes.get("num_heads_q", 2)]
    assert_right(dense_case(**{"head_dim": 16} | sizes, mask=mask_of(1900, *widths)), "cpu")


def test_with_all_others() -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = {
        "bias": torch.randn(2, 1, 130, 250, generator=generator),
        "alibi_slopes": torch.tensor([0.3, 0.05]),
        "dropout_p": 0.2,
        "dropout_seed": 3,
        "window": (150, 20),
        "sinks": torch.tensor([1.0, -0.5]),
        "score_mod": ScoreFunction(tempered_table, (1 + 0.2 * torch.randn(2), torch.randn(2, 17))),
    }
    assert_right(dense_case(seqlen_q=130, seqlen_k=250, **arguments, mask=mask_of(250, 100, 30)), "cpu")


def test_packed_sequences() -> None:
    q, k, v, dout = (torch.randn(n, h, 16) for n, h in ((333, 2), (433, 1), (433, 1), (333, 2)))
    arguments = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets(200, 133), "cu_seqlens_k": offsets(103, 330)}
    assert_right(Case("attention_varlen", arguments | {"mask": mask_of(330, 10**6, 40)}, dout), "cpu")


@pytest.mark.parametrize("dense", [False, True], ids=["function", "bool mask"])
def test_nothing_is_read_of_hidden_blocks(dense: bool) -> None:
    """NaN in keys, values and queries whose pairs with others are all in hidden blocks, also in backward."""
    ids = torch.arange(480) // 192
    q, k, v, dout = (torch.randn(1, 1, 480, 16) for _ in range(4))
    part = slice(192, 384)
    mask = (ids[:, None] == ids)[None, None] if dense else by_document(ids)

    def results(*inputs: Tensor) -> list[Tensor]:
        q, k, v = leaves = [x.clone().requires_grad_() for x in inputs]
        out = flashtile.attention(q, k, v, mask=mask, backend="cpu")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    clean = results(q, k, v)
    for x in (q, k, v):
        x[:, :, part] = torch.nan
    for x, y in zip(clean, results(q, k, v), strict=True):
        assert y[:, :, part].isnan().all()
        keep = torch.ones(480, dtype=torch.bool)
        keep[part] = False
        assert torch.equal(x[:, :, keep], y[:, :, keep])


@pytest.mark.parametrize("shape", ["all", "keys", "rows", "transposed", "one"])
def test_bool_masks(shape: str) -> None:
    """Hidden, partly visible and full blocks of a tensor of any strides, also with a mask function."""
    visible = torch.ones(2, 2, 150, 230, dtype=torch.bool)
    visible[0, :, 100:, :] = False
    visible[:, 1, :, 90:190] = False
    visible[1, 0, 70, 120] = False
    mask = {
        "all": visible,
        "keys": visible[:, :, :1],
        "rows": visible[:, :, :, 120:121],
        "transposed": visible.mT.contiguous().mT,
        "one": visible[:1, 1:, :1, 100:101],
    }[shape]
    assert_right(dense_case(seqlen_q=150, seqlen_k=230, mask=mask, window=(170, 150)), "cpu")


def test_values_of_now() -> None:
    """A mask's tensor that changes between calls, of which the second one is recorded and the third one replayed."""
    q = torch.randn(1, 1, 200, 16, requires_grad=True)
    ids = torch.zeros(200, dtype=torch.int64)
    for n in range(4):
        ids[n * 40 :] = n
        mask = (ids[:, None] == ids)[None, None]
        results = []
        for x in (by_document(ids), mask):
            out = flashtile.attention(q, q, q, mask=x, backend="cpu")
            results.append((out, *torch.autograd.grad(out.square().sum(), q)))
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(("rows", "groups"), [(130, 1), (101, 3), (258, 6), (5, 128), (200, 64)])
def test_positions_of_panels(rows: int, groups: int) -> None:
    """The positions of a panel's rows, no others."""
    found = blocks.panel_positions(rows * groups, 64, groups)
    of_rows = torch.arange(rows * groups) // groups
    assert [x.unique().tolist() for x in found] == [x.unique().tolist() for x in of_rows.split(64)]


def test_entries() -> None:
    """Each block's visible parts, and their state."""
    table = blocks.entry_of_parts()
    for number, (c, b, a) in enumerate(itertools.product(range(3), repeat=3)):
        parts, byte = (a, b, c), int(table[number])
        state, first, last = byte & 3, byte >> tables.FIRST_BIT & 3, byte >> tables.LAST_BIT
        if not any(parts):
            assert byte == HIDDEN
            continue
        inside = parts[first : last + 1]
        assert inside[0] != HIDDEN
        assert inside[-1] != HIDDEN
        assert sum(parts) == sum(inside)
        assert state == (FULL if min(inside) == FULL else PARTIAL)
