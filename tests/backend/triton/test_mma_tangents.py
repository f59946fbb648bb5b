"""Forward mode by the kernel of mma.sync without a GPU: `gluon_emulation` runs it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from gluon_emulation.mma_backend import FOLDER, copy_with_mistake, emulated
from mma_cases import dense, made, randn

import flashtile
from flashtile.backend.triton.tile_config import KernelConfig, TileConfig
from flashtile.testing.case import Case
from flashtile.testing.moving import moving
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
SHARED, OWN = KernelConfig(16, 32, 4, 1, mma=True), KernelConfig(64, 16, 4, 1, mma=True)


def wrong(case: Case, tile: KernelConfig, folder: Path = FOLDER, kernel: str = "mma.tangents") -> list[str]:
    """Results outside of their error bounds."""
    plain = tile._replace(mma=False)
    plan = TileConfig(plain, plain, plain, tangents=tile, given_splits=plain)
    with emulated(plan, folder=folder) as launched, poisoned_allocation(), flashtile.calls() as counts:
        results = case.run("triton")
    assert [(row.direction, row.backend) for row in counts.rows] == [("tangents", "triton")]
    assert launched[-1:] == [kernel]
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


def hidden() -> Case:
    """A bias that is NaN, and so its tangent, where a mask hides pairs."""
    mask = randn(1, 1, 20, 37) > 0
    return dense(mask=mask, bias=randn(1, 2, 20, 37).masked_fill(~mask, torch.nan))


@pytest.mark.parametrize(
    "name", ["causal, more rows than keys", "head dims 96 and 16", "infinite sinks", "bias, whole tiles", "everything",
             "packed, some rows in use"],
)  # fmt: skip
def test_results_are_within_the_bound(name: str) -> None:
    """Warps divide the columns of sums, or have rows of their own."""
    case = moving(replace(made(name), forward_only=True))
    assert wrong(case, (SHARED, OWN)[len(name) % 2]) == []


def test_tangents_of_pairs_that_are_hidden() -> None:
    assert wrong(moving(replace(hidden(), forward_only=True)), SHARED) == []


@pytest.mark.parametrize("names", [("q",), ("v",), ("k", "v")], ids="".join)
def test_some_inputs_move(names: tuple[str, ...]) -> None:
    """Products of the rest are not in the kernel, and their tangents are not loaded."""
    assert wrong(moving(replace(dense(causal=True), forward_only=True), names), SHARED) == []


def test_keys_that_the_caller_splits() -> None:
    """Another kernel has splits: of one, too."""
    case = moving(replace(dense(causal=True, num_splits=1), forward_only=True))
    assert wrong(case, SHARED, kernel="tangents") == []


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("a = moved.a - dlse * acc.a", "a = moved.a", "causal"),
        ("pds = gl.where(p == 0.0, 0.0, pds)", "pds = pds", None),
        ("dqk = mma_v2(left, buffers.dk", "dqk = mma_v2(left, buffers.k", "causal"),
        ("u = u * alpha + gl.sum(pds, 1)", "u = u + gl.sum(pds, 1)", "causal"),
    ],
)
def test_mistakes_are_noticed(old: str, new: str, name: str | None, tmp_path: Path) -> None:
    folder = tmp_path / f"triton_{len(old)}"  # its name is that of the modules
    copy_with_mistake(folder, "kernels/mma/tangents.py", "mistake", old, new)
    case = moving(replace(hidden() if name is None else made(name), forward_only=True))
    assert wrong(case, SHARED, folder) != []
