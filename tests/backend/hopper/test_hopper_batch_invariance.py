"""Batch-invariant calls by the Hopper forward kernel, on the emulation, and which calls it declines."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from gluon_emulation.backend import emulated
from neighbors import Sequence, packed, same_bits

from flashtile.api.explain import described_call
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import candidates, tables
from flashtile.backend.hopper.tile_config import ForwardConfig
from flashtile.call.device import Device
from flashtile.call.problem import Problem
from flashtile.dispatch import fast_path, planner

pytestmark = pytest.mark.usefixtures("one_thread")
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
LENGTH = 300
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "causal": (64, {}),
    "window": (128, {"window": (140, 0)}),
    "features": (64, {"softcap": 4.0, "sinks": torch.tensor([0.5, 2.0])}),
}


@pytest.mark.parametrize("name", CASES)
def test_cuts(name: str) -> None:
    """Rows whose maximum grows, so that warps rescale, in other tiles, among neighbors and in pages."""
    width, options = CASES[name]
    options = options | {"backend": "hopper"}
    sequence = Sequence.random(LENGTH, (2, 1), width, torch.bfloat16)
    with emulated(3, 0) as launched:
        out, lse = packed(sequence, 0, LENGTH, [], **options)
        for (start, stop), page_size in zip(((0, 16), (140, 301), (57, 200)), (None, 8, 64), strict=True):
            stop = min(stop, LENGTH)
            rows = packed(sequence, start, stop, [(40, 60), (1, 1)] if page_size else [], page_size, **options)
            assert same_bits(rows, (out[start:stop], lse[:, start:stop])), (start, stop)
    assert launched.count("forward_kernel") == 4


def problem_of(**options: Any) -> Problem:
    q = torch.empty(1, 4, 200, 64, dtype=torch.bfloat16)
    return Problem.describe(described_call(q, q, q, None, None, {"batch_invariant": True} | options))


def test_blocks_of_one_size_whatever_the_lengths() -> None:
    """Tiles of 64 features may have 128 or 192 rows, whose blocks of keys are alike; keys are never split."""
    given = problem_of(causal=True)
    found = set()
    for batch, rows, keys in ((1, 16, 16), (64, 1000, 200), (2, 8192, 100000)):
        for layout in ("dense", "varlen"):
            problem = replace(given, batch=batch, seqlen_q=rows, seqlen_k=keys, layout=layout).bucketed()
            ways = list(candidates.forward(problem, H200))
            found |= {(x.block_m, x.block_n) for x, _ in ways}
            assert all(splits == x.last_splits == 1 for x, splits in ways)
    assert found == {(128, 128), (192, 128)}


def test_rows_of_a_tile_change_no_bit() -> None:
    sequence = Sequence.random(LENGTH, (2, 1), 64, torch.bfloat16)
    found = []
    for rows in (128, 192):
        planner.forget_plans()
        fast_path.forget()
        with emulated(3, 0), mock.patch.object(candidates, "FORWARD", only(rows)):
            found.append(packed(sequence, 0, LENGTH, [(40, 60)], backend="hopper"))
    planner.forget_plans()
    fast_path.forget()
    assert same_bits(*found)


def only(rows: int) -> dict[tuple[int, int], tuple[ForwardConfig, ...]]:
    """Configurations whose tiles have so many rows."""
    return {width: tuple(x for x in found if x.block_m == rows) for width, found in tables.FORWARD.items()}


def test_declined() -> None:
    """What it lacks with pages it declines in all layouts, and one query of each sequence."""
    assert support.declines(problem_of(), H200) is None
    bias = torch.empty(1, 1, 200, 200, dtype=torch.bfloat16)
    for options in ({"bias": bias}, {"mask": bias > 0}, {"dropout_p": 0.1, "dropout_seed": 1}):
        assert "features that it has with pages" in str(support.declines(problem_of(**options), H200))
    assert "one query" in str(support.declines(replace(problem_of(), seqlen_q=1), H200))
