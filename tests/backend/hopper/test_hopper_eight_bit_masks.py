"""Masks of calls in 8 bits on Hopper, without a GPU: lists of blocks and bits of pairs, and calls that are too short or
too long for them.
"""

import importlib
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from eight_bit_cases import FORMULAS, FP8, IDS, MASKS, mask_case
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated, emulated_kernels
from gluon_emulation.machine import EmulationError
from listed_masks import documents, far_by_head

import flashtile
from flashtile.api.explain import described_call
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import listed
from flashtile.call.device import Device
from flashtile.call.problem import Problem
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
WITH_BITS, WITHOUT_BITS, WITHOUT_LISTS = {}, {"MOST_BITS": 0}, {"MOST_PAIRS": 0}


def wrong(name: str, limits: dict[str, Any], folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds, where these are the limits of lists and bits at the launch."""
    case = mask_case(name, "cpu")
    expected = solve(case)
    of_launch = importlib.import_module(f"{emulated_kernels(folder).__package__}.plan.listed")
    least: dict[str, Any] = {"LEAST_PAIRS": 0, "LEAST_MASK_PAIRS": 0}
    with (
        mock.patch.multiple(listed, **least),
        mock.patch.multiple(of_launch, **least | limits),
        emulated(3, 0, folder) as launched,
        poisoned_allocation(),
    ):
        results = case.run("hopper")
    assert launched[-1] == "eight_bit_forward_kernel"
    assert ("pair_bits_kernel" in launched) == (limits == WITH_BITS)
    assert ("visible_blocks_kernel" in launched) == (limits != WITHOUT_LISTS)
    return [str(x) for x in compare(results, case, expected, rounds_to_eight_bits=True) if not x.ok]


@pytest.mark.parametrize("name", FORMULAS)
def test_biases_and_score_mods(name: str) -> None:
    case = mask_case(name, "cpu")
    with emulated(3, 0) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert launched == ["eight_bit_forward_kernel"]
    assert [str(x) for x in compare(results, case, solve(case), rounds_to_eight_bits=True) if not x.ok] == []


@pytest.mark.parametrize("name", MASKS)
def test_bits_of_pairs(name: str) -> None:
    assert wrong(name, WITH_BITS) == []


@pytest.mark.parametrize("limits", [WITHOUT_BITS, WITHOUT_LISTS])
@pytest.mark.parametrize("name", ["documents, causal", "rows"])
def test_calls_whose_plan_has_bits(name: str, limits: dict[str, Any]) -> None:
    """A plan serves longer and shorter calls, too."""
    assert wrong(name, limits) == []


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("mainloop", "block = block_at(lists, n, entry)", "block = n"),
        ("mainloop", "n, warpgroup * MMA_M, zero_scores", "n, 0, zero_scores"),
        ("producer", "block_at(lists, tile.hi - 1 - step, entry)", "(tile.hi - 1 - step)"),
    ],
)
def test_planted_bugs(file: str, old: str, new: str, tmp_path: Path) -> None:
    folder = tmp_path / f"masks_{abs(hash((file, old)))}"
    copy_with_mistake(folder, f"kernels/eight_bit/{file}.py", old, old, new)
    with suppress(EmulationError):
        assert wrong("documents, causal", WITH_BITS, folder) != []


@pytest.mark.parametrize("mask", [flashtile.MaskMod(far_by_head, (torch.tensor([0, 140, 220, 0]),)), None])
def test_masks_of_heads_and_of_short_calls_are_declined(mask: Any) -> None:
    q = torch.empty(1, 4, 8192, 128).to(FP8)
    keywords = {"mask": flashtile.MaskMod(documents, (IDS,)) if mask is None else mask}
    rows = q[:, :, :64] if mask is None else q
    problem = Problem.describe(
        described_call(rows, rows if mask is None else q, q[:, :, : rows.shape[2]], None, None, keywords)
    )
    reason = support.declines(problem, Device("cuda", "NVIDIA H200", "sm_90", 132))
    assert reason == "in 8 bits, it supports masks of large dense calls, the same for all heads, without a score_mod"
