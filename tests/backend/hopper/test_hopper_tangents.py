"""Forward mode of the Hopper backend without a GPU: `gluon_emulation` runs its kernels."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated
from gluon_emulation.machine import EmulationError
from hopper_variants import case_of

import flashtile
from flashtile.api.explain import described_call
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import tables
from flashtile.backend.hopper.tile_config import TangentsConfig
from flashtile.call.call import Needs
from flashtile.call.device import Device
from flashtile.call.problem import Problem
from flashtile.testing.case import Case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
CORES = 3
LENGTHS = (33, 65, 129)  # longer ones run on a GPU
ALL = ("q", "k", "v")


def wrong(case: Case, seed: int = 0, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds."""
    with emulated(CORES, seed, folder) as launched, poisoned_allocation(), flashtile.calls() as counts:
        results = case.run("hopper")
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "hopper")]
    assert launched[-1] == "tangents_kernel"
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", ["mask and softcap 128", "sinks 104/72", "causal 192/128", "packed dropout 256"])
def test_variants(name: str) -> None:
    assert wrong(moving(case_of(name, sum(name.encode()), "cpu", LENGTHS), ALL)) == []


def test_longer_blocks_without_early_values() -> None:
    """A configuration that `benchmarks/derivatives.py` tries."""
    config = TangentsConfig(tables.D128, tables.D128, 5, block_n=128, early_values=False)
    with mock.patch.dict(tables.TANGENTS, {(128, 128): (config,)}):
        assert wrong(moving(case_of("causal 128", 2, "cpu", LENGTHS), ALL)) == []


@pytest.mark.parametrize("names", [("q",), ("v",), ("q", "k"), ("k", "v")], ids="".join)
def test_some_inputs_move(names: tuple[str, ...]) -> None:
    """Products of the rest are not in the kernel, and their tangents are not loaded."""
    case = case_of("window 128", 1, "cpu", (33, 70))
    assert wrong(moving(case, names)) == []


def test_repeated_calls() -> None:
    """Planned, recorded, replayed."""
    case = moving(case_of("causal 128", 1, "cpu", (33,)), ALL)
    expected = solve(case)
    with emulated(CORES) as launched:
        for _ in range(3):
            assert [str(x) for x in compare(case.run("hopper"), case, expected) if not x.ok] == []
    assert launched == ["forward_kernel", "tangents_kernel"] * 3


def test_split_keys_and_unrounded_sums() -> None:
    """Few rows, whose keys programs share. All keys move alike, and values are nearly equal: `dlse out` is nearly all
    of the sum that it is subtracted from, so that an `out` of 16 bits would not do.
    """
    torch.manual_seed(0)
    v = 1 + 2.0**-7 * torch.randint(2, (1, 1, 2000, 96))  # out lies in the middle between two numbers of 16 bits
    q, k, dk = torch.rand(1, 1, 33, 96), torch.randn(v.shape), torch.rand(1, 1, 1, 96)
    q, k, v, dk = (x.bfloat16() for x in (q, k, v, dk.expand(v.shape).contiguous()))
    case = Case("attention", {"q": q, "k": k, "v": v, "num_splits": 4}, forward_only=True)
    case = replace(moving(case, ("k",)), tangents={"k": dk})
    assert wrong(case) == []


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("dout = total - scale_rows(out, dlse)", "dout = total", None),
        ("p = where_bits(visible, p, 0.0)", "p = p", None),
        ("consumer_release(kv.empty, of_dk, STAGES)", "pass", EmulationError),
        ("ds, weight = warpgroup_mma_wait(DV_GEMMS * EARLY, deps=(ds, weight))", "pass", EmulationError),
    ],
)
def test_mistakes_are_noticed(old: str, new: str, error: type[Exception] | None, tmp_path: Path) -> None:
    folder = tmp_path / f"hopper_{len(old)}"  # its name is that of the modules
    copy_with_mistake(folder, "kernels/tangents/tangents.py", "mistake", old, new)
    case = moving(case_of("causal 128", 1, "cpu", (192,)), ALL)
    if error is None:
        assert wrong(case, 1, folder) != []
    else:
        with pytest.raises(error):
            wrong(case, 1, folder)


def test_what_it_declines() -> None:
    """Tangents of terms of scores, float32 and widths without a kernel."""
    device, q = Device("cuda", "emulated", support.ARCHITECTURE, CORES), torch.empty(1, 2, 64, 128)

    def reason(q: torch.Tensor, **moves: bool) -> str | None:
        problem = Problem.describe(described_call(q, q, q, None, None, {"sinks": q[0, :, 0, 0]}))
        return support.declines_tangents(problem, device, Needs(q=True, **moves))

    assert reason(q.half()) is None
    for found in (reason(q.half(), sinks=True), reason(q), reason(q.half()[..., :32])):
        assert found is not None
        assert "forward mode" in found
