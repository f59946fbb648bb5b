"""Forward mode by the kernel of mma.sync without a GPU: `gluon_emulation` runs it."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon")

from gluon_emulation.mma_backend import FOLDER, emulated
from mma_cases import CASES, dense, made

import flashtile
from flashtile.backend.triton.tile_config import KernelConfig, TileConfig
from flashtile.testing.case import Case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
SHARED, OWN = KernelConfig(16, 32, 4, 1, mma=True), KernelConfig(64, 16, 4, 1, mma=True)


def wrong(case: Case, tile: KernelConfig, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds."""
    plain = tile._replace(mma=False)
    with emulated(TileConfig(plain, plain, plain, tangents=tile), folder=folder) as launched, poisoned_allocation():
        with flashtile.calls() as counts:
            results = case.run("triton")
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "triton")]
    assert launched[-1:] == ["mma.tangents"]
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", CASES)
def test_results_are_within_the_bound(name: str) -> None:
    case = made(name)
    assert wrong(moving(replace(case, forward_only=True)), (SHARED, OWN)[sum(name.encode()) % 2]) == []
