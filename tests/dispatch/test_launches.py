"""The tiles of a call that has not run: those of its launches, not those that its plan has for several calls."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from forced import Choice, first, in_order

from flashtile.api.explain import described_call
from flashtile.backend.gpu import cost
from flashtile.backend.triton.tile_config import TileConfig
from flashtile.call.call import DIFFERENTIABLE, Call, Needs
from flashtile.call.plan import Plan
from flashtile.call.problem import Problem
from flashtile.dispatch.launches import launches_of, tiles_of, unsplit
from flashtile.dispatch.planner import SUPPORT
from flashtile.prebuilt.launches import device_of

SM_90 = device_of("sm_90")
OTHERS = {"split_rows", "preprocess", "operand", "store"}
BETWEEN_PRODUCTS = {"products": "softmax", "products in backward": "gradient"}


@pytest.fixture(params=["ieee", "tf32"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.backends.cuda.matmul.fp32_precision = request.param
    yield request.param
    torch.backends.cuda.matmul.fp32_precision = "none"


def planned(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    arch: str,
    needed: tuple[str, ...],
    keys: int = 0,
    backend: str = "triton",
    choices: tuple[Choice, Choice] = (first(), first()),
    **keywords: Any,
) -> tuple[Call, Plan, Plan, Needs]:
    """A call, its plans of forward and backward by these choices, and the gradients that are needed."""
    batch, heads, rows, width = shape
    q, k = (torch.empty(batch, heads, n, width, dtype=dtype, device="meta") for n in (rows, keys or rows))
    call = described_call(q, k, k, None, None, keywords)
    problem, device = Problem.describe(call).bucketed(), device_of(arch)
    needs = Needs(*(name in needed for name in DIFFERENTIABLE))
    plans = []
    with mock.patch.object(cost, "ranked", in_order):
        for choose, wanted in zip(choices, (None, needs), strict=True):
            way = choose(SUPPORT[backend].candidates(problem, device, wanted))
            plans.append(Plan(backend, way.tile, way.num_splits, ()))
    return call, *plans, needs


@pytest.mark.parametrize(
    ("shape", "dtype", "arch", "needed", "kernels"),
    [
        ((4, 2, 32, 64), torch.bfloat16, "sm_80", ("q", "k", "v"), {"forward", "fused"}),
        ((4, 2, 32, 64), torch.bfloat16, "sm_80", ("q", "k"), {"forward", "dkdv", "dq"}),
        ((1, 2, 2048, 32), torch.float32, "sm_90", ("q", "v"), {"forward", "dkdv", "dq"}),
        ((1, 2, 2048, 32), torch.float32, "sm_90", ("k",), {"forward", "dkdv"}),
        ((1, 2, 4096, 256), torch.float32, "sm_90", ("q", "k", "v"), {"products", "products in backward"}),
        ((1, 1, 1024, 512), torch.bfloat16, "sm_90", ("q", "k", "v"), {"forward", "products in backward"}),
    ],
)
def test_tiles_of_triton(
    shape: tuple[int, ...], dtype: torch.dtype, arch: str, needed: tuple[str, ...], kernels: set[str], precision: str
) -> None:

    def wanted(tile: TileConfig) -> bool:
        return (tile.products is None or "products" in kernels) and (tile.fused is not None) == (shape[2] == 32)

    choices = first(where=lambda tile: tile.products is None or "products" in kernels), first(where=wanted)
    call, forward, backward, needs = planned(shape, dtype, arch, needed, choices=choices)
    tiles = tiles_of(forward, call) | tiles_of(backward, call, needs)
    tiles = {name: x for name, x in tiles.items() if x is not None}
    assert set(tiles) == kernels
    launches = launches_of(call, device_of(arch), forward, (backward, needs))
    launched = {x.kernel.name.removesuffix("_kernel"): x.scalars for x in launches}
    for name, kernel in BETWEEN_PRODUCTS.items():
        if name in kernels:
            split = dtype is torch.float32 and precision == "ieee"
            assert launched.pop(kernel)["PARTS"] == split == ("bfloat16 parts" in tiles.pop(name))
    assert set(launched) - OTHERS == set(tiles)
    for name, tile in tiles.items():
        scalars, sizes = launched[name], getattr(tile, "tile", tile)[:4]
        found = scalars["CONFIG"]
        assert sizes == (found.BLOCK_M, found.BLOCK_N, scalars["num_warps"], scalars["num_stages"])


@pytest.mark.parametrize("num_splits", [None, 12, 10**9])
def test_growing_keys_do_not_recompile(num_splits: int | None) -> None:
    """The number of splits is a constant of the kernel."""
    found = set()
    for keys in (520, 521, 600, 777, 1000):
        call, forward, _, _ = planned((1, 2, 1, 64), torch.bfloat16, "sm_90", ("q",), keys, num_splits=num_splits)
        found.add(launches_of(call, SM_90, forward)[0].scalars["CONFIG"])
    assert len(found) == 1


@pytest.mark.parametrize("num_splits", [None, 3])
def test_tiles_for_a_number_of_splits(num_splits: int | None) -> None:
    """A caller who chooses it gets the same tile for every number of sequences."""
    others = first(where=lambda tile: tile.given_splits is not None), first()
    call, forward, _, _ = planned(
        (64, 2, 16, 64), torch.bfloat16, "sm_90", ("q",), num_splits=num_splits, keys=2048, choices=others
    )
    launched = launches_of(call, SM_90, forward)[0].scalars["CONFIG"]
    assert forward.tile.given_splits is not None
    assert tiles_of(forward, call)["forward"] == (forward.tile.given_splits if num_splits else forward.tile.forward)
    assert tiles_of(forward, call)["forward"][:2] == (launched.BLOCK_M, launched.BLOCK_N)


@pytest.mark.parametrize(
    ("shape", "dtype", "backend", "reason"),
    [
        ((1, 2, 300, 64), torch.bfloat16, "triton", None),
        ((1, 2, 4096, 256), torch.float32, "triton", "PyTorch multiplies"),
        ((1, 2, 300, 64), torch.bfloat16, "hopper", None),
        ((1, 2, 300, 128), torch.float32, "hopper", "keys of float32"),
    ],
)
def test_why_keys_are_not_split(shape: tuple[int, ...], dtype: torch.dtype, backend: str, reason: str | None) -> None:
    """A number of splits changes the launches, unless there is a reason why it is not used."""
    launches = []
    for num_splits in (1, 3):
        call, forward, _, _ = planned(shape, dtype, "sm_90", ("q",), num_splits=num_splits, backend=backend)
        launches.append([(x.kernel.name, x.scalars) for x in launches_of(call, SM_90, forward)])
    assert (launches[0] == launches[1]) == (reason is not None)
    why = unsplit(forward, call)
    assert why is None if reason is None else reason in str(why)
    assert unsplit(forward, planned(shape, dtype, "sm_90", ("q",), backend=backend)[0]) is None


@pytest.mark.parametrize(("rows", "warpgroups"), [(2000, 2), (2048, 3)])
def test_tiles_of_hopper_without_bits(rows: int, warpgroups: int) -> None:
    """The plan of 1025 to 2048 rows expects bits of a mask's pairs, which smaller calls of it do not have."""
    mask = torch.empty(1, 1, 1, rows, dtype=torch.bool, device="meta")
    three = first(where=lambda config: config.num_warpgroups == 3), first()
    call, forward, backward, needs = planned(
        (1, 16, rows, 64), torch.bfloat16, "sm_90", ("q", "k", "v"), backend="hopper", choices=three, mask=mask
    )
    launches = launches_of(call, SM_90, forward, (backward, needs))
    launched = {x.kernel.name: x.scalars["CONFIG"] for x in launches if "CONFIG" in x.scalars}
    assert tiles_of(forward, call)["forward"].compiled == launched["forward_kernel"]
    assert launched["forward_kernel"].num_warpgroups == warpgroups
    assert str(tiles_of(backward, call, needs)["backward"]) == str(launched["backward_kernel"])


def test_parts_of_float32_on_hopper(precision: str) -> None:
    call, forward, _, _ = planned((1, 2, 2048, 128), torch.float32, "sm_90", ("q",), backend="hopper")
    [launched] = [x.scalars["CONFIG"] for x in launches_of(call, SM_90, forward) if x.kernel.name.startswith("float32")]
    assert tiles_of(forward, call)["forward"] == launched
    assert f"{2 if precision == 'tf32' else 3} bfloat16 parts" in str(launched)
