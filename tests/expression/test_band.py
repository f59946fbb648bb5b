"""The band of a mask function becomes a window: the same pairs, whatever else the function and the call have."""

import operator
import random
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor

import flashtile
from flashtile import MaskMod, mask_mods
from flashtile.api.explain import described_call
from flashtile.api.normalize import normalize
from flashtile.distributed.inputs import DEFAULTS, normalized
from flashtile.expression import Formula, mask_mod_formula, mask_mod_function
from flashtile.expression.band import split
from flashtile.expression.blocks import has_classes

ROWS, KEYS = 13, 17
IDS = torch.arange(KEYS) // 5
Condition = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def bands(n: int, m: int) -> list[Condition]:
    """Conditions on the distance, in all forms that are recognized."""
    return [
        lambda b, h, i, j: j <= i + n,
        lambda b, h, i, j: i - n < j,
        lambda b, h, i, j: j - i >= n,
        lambda b, h, i, j: n > i - j + m,
        lambda b, h, i, j: ~(i + n < j - m),
        lambda b, h, i, j: ~~(j.int() >= i),
        lambda b, h, i, j: (i - j + m).abs() <= n,
        lambda b, h, i, j: n > (j - i).abs(),
    ]


def others(n: int, m: int) -> list[Condition]:
    """Conditions of which none is a band, although some look like one."""
    return [
        lambda b, h, i, j: IDS[i] == IDS[j],
        lambda b, h, i, j: (i - j) % 3 != n,
        lambda b, h, i, j: (j <= i) | (j < n),
        lambda b, h, i, j: ~((j <= i) & (j > n)),
        lambda b, h, i, j: j <= 2 * i + n,
        lambda b, h, i, j: i + j < 20 + n,
        lambda b, h, i, j: j <= i + h,
        lambda b, h, i, j: (i - j).abs() >= n,
        lambda b, h, i, j: (i - j).abs() <= j,
        lambda b, h, i, j: j <= i * 0.9 + n,
        lambda b, h, i, j: i - j != m,
    ]


def random_mask(seed: int) -> tuple[MaskMod, int]:
    """A conjunction, and its number of conditions that are no bands."""
    draw = random.Random(seed)
    own = [draw.choice(bands(draw.randint(-4, 6), draw.randint(-3, 3))) for _ in range(draw.randint(0, 3))]
    rest = [draw.choice(others(draw.randint(-4, 6), draw.randint(-3, 3))) for _ in range(draw.randint(not own, 2))]
    conditions = draw.sample(own + rest, len(own) + len(rest))
    return MaskMod(lambda *pair: reduce(operator.and_, [condition(*pair) for condition in conditions])), len(rest)


def pairs(key: str, tensors: tuple[Tensor, ...] = ()) -> Tensor:
    """`[2, 2, ROWS, KEYS]`"""
    dims = (torch.arange(n).view(-1, *[1] * k) for n, k in zip((2, 2, ROWS, KEYS), (3, 2, 1, 0), strict=True))
    return mask_mod_function(key)(*dims, *tensors).expand(2, 2, ROWS, KEYS)


@pytest.mark.parametrize("seed", range(60))
def test_random_conjunctions(seed: int) -> None:
    """Band and rest show the pairs of the mask; every band is found, and what is none stays."""
    mask, num_rest = random_mask(seed)
    found = split(mask.key)
    expected = pairs(mask.key, mask.tensors)
    if found is None:
        assert num_rest > 0
        return
    left, right, rest = found
    assert (rest is None) == (num_rest == 0)
    distance = torch.arange(ROWS)[:, None] - torch.arange(KEYS)
    visible = torch.ones(2, 2, ROWS, KEYS, dtype=torch.bool) if rest is None else pairs(rest, mask.tensors)
    visible = visible if left is None else visible & (distance <= left)
    visible = visible if right is None else visible & (distance >= -right)
    assert torch.equal(visible, expected)
    assert rest is None or split(rest) is None


@pytest.mark.parametrize("seed", range(12))
def test_calls(seed: int) -> None:
    """A call shows the pairs of mask and window, for lengths that differ, also where some rows see no key."""
    draw, mask = random.Random(seed), random_mask(seed)[0]
    seqlen_q, seqlen_k = draw.choice([(ROWS, KEYS), (ROWS, ROWS), (KEYS, ROWS)])
    sides = draw.choice([None, (3, 2), flashtile.ExactWindow(None, -2)])
    q = torch.randn(2, 2, seqlen_q, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, seqlen_k, 8, dtype=torch.float64)
    b, h, i, j = (torch.arange(n).view(-1, *[1] * m) for n, m in ((2, 3), (2, 2), (seqlen_q, 1), (seqlen_k, 0)))
    dense = mask_mod_function(mask.key)(b, h, i, j, *mask.tensors).expand(2, 2, seqlen_q, seqlen_k)
    others: list[dict[str, Any]] = [{"window": sides}, {"causal": "top_left"}, {"causal": True, "attention_chunk": 6}]
    for arguments in others:
        expected = flashtile.attention(q, k, v, mask=dense, backend="reference", **arguments)
        torch.testing.assert_close(flashtile.attention(q, k, v, mask=mask, **arguments), expected)


@pytest.mark.parametrize("seqlen_k", [40, 56])
def test_bits_of_the_argument(seqlen_k: int) -> None:
    """A mask that is a window or causal gives the bits of the argument, also under a compiler, and for a function that
    is left over.
    """
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (40, seqlen_k, seqlen_k))
    even = MaskMod(lambda b, h, i, j: j % 2 == 0)
    compiled = torch.compile(flashtile.attention, backend="eager", fullgraph=True)
    offset = seqlen_k - 40
    calls: list[tuple[MaskMod, dict[str, Any]]] = [
        (mask_mods.causal(offset), {"causal": True}),
        (mask_mods.causal(), {"causal": "top_left"}),
        (mask_mods.window(9, 2, offset), {"window": (9, 2)}),
        (mask_mods.and_masks(mask_mods.window(9, 0, offset), even), {"window": (9, 0), "mask": even}),
    ]
    for mask, arguments in calls:
        expected = flashtile.attention(q, k, v, **arguments)
        for attend in (flashtile.attention, compiled):
            out = attend(q, k, v, mask=mask)
            same = torch.equal if attend is flashtile.attention or offset == 0 else torch.allclose
            for x, y in zip(
                (out, *torch.autograd.grad(out.sum(), (q, k, v))),
                (expected, *torch.autograd.grad(expected.sum(), (q, k, v), retain_graph=True)),
                strict=True,
            ):
                assert same(x, y)


def test_packed_sequences() -> None:
    """Lengths differ from sequence to sequence, so causal alone is recognized."""
    q, k = torch.randn(20, 2, 8), torch.randn(23, 2, 8)
    offsets = torch.tensor([0, 12, 20], dtype=torch.int32), torch.tensor([0, 9, 23], dtype=torch.int32)
    for mask, top_left in (
        (mask_mods.causal(), True),
        (mask_mods.and_masks(mask_mods.causal(), lambda b, h, i, j: j % 2 == 0), True),
        (mask_mods.window(3, 1), False),
    ):
        call = described_call(q, k, k, *offsets, {"mask": mask})
        assert call.settings.top_left is top_left
        b, i, j = torch.arange(2)[:, None, None, None], torch.arange(12)[:, None], torch.arange(14)
        dense = mask_mod_function(mask.key)(b, b * 0, i, j, *mask.tensors).expand(2, 1, 12, 14)
        expected = flashtile.attention_varlen(q, k, k, *offsets, mask=dense, max_seqlen_q=12, max_seqlen_k=14)
        torch.testing.assert_close(flashtile.attention_varlen(q, k, k, *offsets, mask=mask), expected)


def test_a_rank_of_a_sharded_call_keeps_the_function() -> None:
    """Also after a call with tensors of the same layouts and all positions, and before it."""
    mask, (q, k) = mask_mods.window(3, 0), (torch.randn(1, 2, n, 16) for n in (4, 8))
    tensors = {"q": q, "k": k, "v": k, "mask": mask, "bias": None, "alibi_slopes": None, "sinks": None}
    for _ in range(2):
        of_rank = normalized(tensors, DEFAULTS).settings
        assert (of_rank.window_left, of_rank.window_right, of_rank.mask_mod) == (None, None, mask.key)
        whole = normalize("attention", dict(tensors), num_splits=None, **DEFAULTS).settings
        assert (whole.window_left, whole.window_right, whole.mask_mod) == (7, -4, None)


def test_documents_have_classes() -> None:
    """Rows see keys of their own document, also with other conditions."""
    document = mask_mods.document(IDS)
    for mask, expected in (
        (document, True),
        (mask_mods.and_masks(mask_mods.causal(torch.tensor(2)), document), True),
        (mask_mods.or_masks(mask_mods.causal(), document), False),
        (mask_mods.prefix(torch.tensor([3])), False),
    ):
        formula = mask_mod_formula(mask.key)
        assert isinstance(formula, Formula)
        assert has_classes(formula) is expected


def test_what_stays_a_mask() -> None:
    """Bands of tensors, lists of blocks, functions whose tensors nothing else reads, distances that the rest reads."""
    lists = flashtile.BlockMask(torch.tensor([[[1]]]), torch.tensor([[[[0]]]]), mask=mask_mods.causal())
    unread = MaskMod(lambda b, h, i, j, x: j <= i, (torch.zeros(3),))
    others = (mask_mods.prefix(torch.tensor([3])), mask_mods.dilated(9, 2))
    for mask in (mask_mods.causal(torch.tensor(2)), lists, unread, *others):
        assert split(mask.key) is None
    assert split(mask_mods.and_masks(lists, mask_mods.causal()).key)[:2] == (None, 0)  # type: ignore[index]
