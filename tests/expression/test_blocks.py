"""Visibility of blocks of pairs, against the mask of every pair."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from no_reads import NoReads
from programs import INTEGERS, REALS
from torch import Tensor

from flashtile import MaskMod, mask_mods
from flashtile.expression import Formula, mask_mod_formula
from flashtile.expression.blocks import FULL, HIDDEN, PARTIAL, Blocks, block_visibility, positions

CPU = torch.device("cpu")
B, H, SQ, SK, M, N = 2, 3, 203, 211, 16, 24
IDS = torch.sort(torch.randint(0, 5, (2, 260), generator=torch.Generator().manual_seed(0)))[0]
LATER = IDS + 1
ENDS = torch.searchsorted(IDS, IDS, right=True)  # of the documents
RUNS = torch.stack([ENDS, ENDS + 30, torch.searchsorted(IDS, IDS) - 40, torch.searchsorted(IDS, IDS)], -1)[:, None]
LENGTHS = torch.tensor([90, 17])
DENSE = torch.rand(2, 3, SQ, SK, generator=torch.Generator().manual_seed(1)) < 0.004
LISTED = torch.rand(2, 1, 7, 6, generator=torch.Generator().manual_seed(2)) < 0.5
PARENTS = torch.tensor([-1, *((n - 1) // 2 for n in range(1, SQ))])
CAUSAL = mask_mods.causal()


def formula_of(mod: MaskMod) -> Formula:
    formula = mask_mod_formula(mod.key)
    assert isinstance(formula, Formula)
    return formula


def found_and_expected(
    mod: MaskMod, i0: int = 0, j0: int = 0, real: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The visibility of all blocks from the formula, and from every pair; `[B, H, blocks, blocks]`."""
    formula, b, h = formula_of(mod), torch.arange(B), torch.arange(H)
    blocks = Blocks(b, h, positions(i0, SQ, M, CPU), positions(j0, SK, N, CPU))
    found = block_visibility(formula, mod.tensors, blocks, real)
    rows, keys = torch.arange(i0, i0 + SQ)[:, None], torch.arange(j0, j0 + SK)
    score = torch.zeros((), dtype=real)
    visible = formula.run((score, b[:, None, None, None], h[:, None, None], rows, keys), mod.tensors)
    visible = visible.expand(B, H, SQ, SK)
    padded = [visible.new_full((B, H, len(blocks.rows) * M, len(blocks.keys) * N), fill) for fill in (False, True)]
    for x in padded:
        x[:, :, :SQ, :SK] = visible
    some, every = (x.view(B, H, len(blocks.rows), M, len(blocks.keys), N) for x in padded)
    return found.expand(some.any(5).any(3).shape), some.any(5).any(3).to(torch.uint8) + every.all(5).all(3)


def assert_sound(found: Tensor, expected: Tensor) -> None:
    assert not ((found == HIDDEN) & (expected != HIDDEN)).any(), "a visible pair is hidden"
    assert not ((found == FULL) & (expected != FULL)).any(), "a hidden pair is in a full block"


# Exact ones -----------------------------------------------------------------------------------------------------------

EXACT = {
    "causal": CAUSAL,
    "causal with an offset": mask_mods.causal(torch.tensor(SK - SQ)),
    "window": mask_mods.window(40, 5),
    "window of later keys": mask_mods.window(-20, 70, -3),
    "no window": mask_mods.window(-5, -5),
    "prefix": mask_mods.prefix(LENGTHS),
    "document": mask_mods.document(IDS),
    "document of all sequences": mask_mods.document(IDS[0].int()),
    **{f"dilated by {n}": mask_mods.dilated(101, n) for n in (1, 2, 7, 41, 100)},
    "dilated with an offset": mask_mods.dilated(61, 60, 13),
    "block lists": MaskMod(lambda b, h, i, j: LISTED[b, 0, i // 32, j // 48]),
    "dense": MaskMod(lambda b, h, i, j: DENSE[b, h, i, j]),
    "causal and window": mask_mods.and_masks(CAUSAL, mask_mods.window(40, 40)),
    "causal and document": mask_mods.and_masks(CAUSAL, mask_mods.document(IDS)),
    "causal and prefix": mask_mods.and_masks(CAUSAL, mask_mods.prefix(LENGTHS)),
    "flashmask, causal documents": mask_mods.flashmask(RUNS[..., :1], causal=True),
    "flashmask, documents": mask_mods.flashmask(RUNS[..., ::3]),
    "neighborhood": mask_mods.neighborhood((260,), (21,)),
    "lengths of heads": MaskMod(lambda b, h, i, j: j < 40 * h + LENGTHS[b]),
    "rows": MaskMod(lambda b, h, i, j: i % 50 < 16),
    "keys that follow": MaskMod(lambda b, h, i, j: (j - i) % 97 == 5),
    "all": MaskMod(lambda b, h, i, j: i >= 0),
    "none": MaskMod(lambda b, h, i, j: (i < 0) | (j < 0)),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    """Every block's state is right, also where positions do not begin at 0."""
    for i0, j0 in ((0, 0), (5, 0), (0, 31)):
        if name == "dense" and (i0, j0) != (0, 0):
            continue
        found, expected = found_and_expected(EXACT[name], i0, j0)
        assert torch.equal(found, expected)


def test_one_entry_where_sequences_or_heads_are_equal() -> None:
    blocks = Blocks(torch.arange(B), torch.arange(H), positions(0, SQ, M, CPU), positions(0, SK, N, CPU))
    shapes = {"causal": (1, 1), "prefix": (B, 1), "lengths of heads": (B, H)}
    for name, shape in shapes.items():
        mod = EXACT[name]
        assert block_visibility(formula_of(mod), mod.tensors, blocks, torch.float32).shape == (*shape, 13, 9)


# Conservative ones ----------------------------------------------------------------------------------------------------

TABLE = torch.rand(3, 9, generator=torch.Generator().manual_seed(3)) < 0.5
REACH = torch.tensor([10.5, torch.nan, 60.5])
WIDE = torch.tensor([-(2**62) - 5, 2**62 + 9, 2**63 - 1, -(2**63), 0])
EXCESS = {  # blocks taken for partial of those that are hidden or full
    "causal or window": (mask_mods.or_masks(CAUSAL, mask_mods.window(30, 50)), 0.04),
    "neighborhood of a grid": (mask_mods.neighborhood((29, 7), (5, 3)), 0.16),
    "block diffusion": (mask_mods.block_diffusion(100, 20), 0.13),
    "flashmask of two runs": (mask_mods.flashmask(RUNS), 0.03),
    "tree": (mask_mods.tree(PARENTS, 8), 0.7),
    "documents in any order": (mask_mods.document(IDS.roll(50, 1)), 0.12),
    "distances": (MaskMod(lambda b, h, i, j: TABLE[h, (i - j).clamp(-4, 4) + 4]), 1.0),
    "reach of heads": (MaskMod(lambda b, h, i, j: (i - j).abs() < REACH[h]), 0.41),
    "bits": (MaskMod(lambda b, h, i, j: ((i ^ j) & 64) == 0), 1.0),
    "rounded": (MaskMod(lambda b, h, i, j: (i - j) * 0.1 < 3), 1.0),
    "wrapping": (MaskMod(lambda b, h, i, j: WIDE[i % 5] - WIDE[j % 5] + i < 9), 1.0),
    "outside": (MaskMod(lambda b, h, i, j: IDS[b, i + j] == 0), 1.0),
    "outside of what is never 0": (MaskMod(lambda b, h, i, j: LATER[b, i + j] > 0), 1.0),
    "divisor of 0": (MaskMod(lambda b, h, i, j: (i - j) % (h - 1) == 0), 1.0),
}


@pytest.mark.parametrize("name", EXCESS)
def test_conservative(name: str) -> None:
    """No visible pair in a hidden block, no hidden one in a full block; and not more partial blocks than known."""
    mod, most = EXCESS[name]
    found, expected = found_and_expected(mod)
    assert_sound(found, expected)
    simple = expected != PARTIAL
    assert (found[simple] == PARTIAL).float().mean().nan_to_num() <= most


def test_rounded_reals_are_unknown() -> None:
    """Kernels round results of arithmetic in other ways."""
    for fn in (lambda b, h, i, j: i * 0.1 < j + 1000, lambda b, h, i, j: (i * 0.1).int() < j + 1000):
        assert (found_and_expected(MaskMod(fn))[0] == PARTIAL).all()


Condition = Callable[[Tensor, Tensor], Tensor]
CONDITIONS: tuple[Condition, ...] = (
    torch.lt, torch.le, torch.gt, torch.ge, torch.eq, torch.ne,
    lambda x, y: x % 7 == y.clamp(0, 6), lambda x, y: (x <= 30) & (x % 20 == 0), lambda x, y: x % 16 < 4,
)  # fmt: skip
LOGIC: tuple[Condition, ...] = (
    torch.logical_and, torch.logical_or, torch.logical_xor, torch.eq, lambda x, y: ~x & y,
    lambda x, y: torch.where(x, y, ~y), lambda x, y: x & ~(x & y), lambda x, y: x.int() + y.int() > 1,
)  # fmt: skip


@st.composite
def masks(draw: st.DrawFn) -> MaskMod:
    """A mask of random operations on indices and captured tensors."""
    number = st.integers(0, 99)
    steps = draw(st.lists(st.tuples(number, number, number), min_size=4, max_size=14))

    def fn(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        integers, conditions = [i, j, i - j, h, b, i * 0 + 40, IDS[b, i], IDS[b, j], LENGTHS[b]], [j < 3 * i]
        for which, x, y in steps:
            m, n = integers[x % len(integers)], integers[y % len(integers)]
            if which % 3 == 0:
                step = INTEGERS[which // 3 % len(INTEGERS)][1]
                integers += [step(m, n), IDS[h % 2, step(m, n).clamp(-300, 300)]]
            elif which % 3 == 1:
                conditions.append(CONDITIONS[which // 3 % len(CONDITIONS)](m, n))
                conditions.append(LISTED[b, 0, m // 30, n // 30])
            else:
                p, q = conditions[x % len(conditions)], conditions[y % len(conditions)]
                conditions.append(LOGIC[which // 3 % len(LOGIC)](p, q))
                if which % 4 == 0:
                    conditions.append(REALS[which // 4 % len(REALS)][1](m * 0.25) > n)
        return conditions[-1] if steps[0][0] % 2 else conditions[-1] & conditions[0] | conditions[len(conditions) // 2]

    fn.__qualname__ = f"mask of {steps}"
    return MaskMod(fn)


@given(masks(), st.sampled_from((0, 7)), st.sampled_from((torch.float32, torch.float64)))
@settings(max_examples=100, deadline=None)
def test_random_masks(mod: MaskMod, first: int, real: torch.dtype) -> None:
    assert_sound(*found_and_expected(mod, first, 2 * first, real))


# How it runs ----------------------------------------------------------------------------------------------------------


def test_the_host_reads_nothing() -> None:
    with NoReads():
        for mod in (*EXACT.values(), *(mod for mod, _ in EXCESS.values())):
            blocks = Blocks(torch.arange(B), torch.arange(H), positions(0, SQ, M, CPU), positions(0, SK, N, CPU))
            block_visibility(formula_of(mod), mod.tensors, blocks, torch.float32)


def test_values_of_now() -> None:
    """A tensor that changed in place counts with its new values."""
    ids = torch.zeros(SK, dtype=torch.int64)
    mod = mask_mods.document(ids)
    assert (found_and_expected(mod)[0] == FULL).all()
    ids[100:] = 1
    found, expected = found_and_expected(mod)
    assert torch.equal(found, expected)
    assert len(found.unique()) == 3


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 1)])
def test_few_positions(sizes: tuple[int, int]) -> None:
    blocks = Blocks(torch.arange(1), torch.arange(1), *(positions(0, n, 16, CPU) for n in sizes))
    found = block_visibility(formula_of(CAUSAL), (), blocks, torch.float32)
    assert found.shape == (1, 1, *(-(-n // 16) for n in sizes))
    assert (found == FULL).all()
