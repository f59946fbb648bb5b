"""The candidates of problems: kernels that hold them. Needs neither Triton nor a GPU."""

from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from calls import dense_call

from flashtile.backend.gpu.chips import SHARED_MEMORY
from flashtile.backend.triton import support
from flashtile.backend.triton.plan import candidates, few_rows, tables
from flashtile.backend.triton.plan.cost import fits
from flashtile.backend.triton.tile_config import KernelConfig, TileConfig
from flashtile.call.call import Features, Needs
from flashtile.call.device import Device
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import Window

H200, A100 = Device("cuda", "H200", "sm_90", 132), Device("cuda", "A100", "sm_80", 108)
QKV = Needs(True, True, True)
PAIRS = Features(bias=(True,) * 4)


def problem(**changes: Any) -> Problem:
    plain = replace(Problem.describe(dense_call(torch.bfloat16)), head_dim=128, head_dim_v=128, alignment=16)
    return replace(plain, **{"seqlen_q": 4096, "seqlen_k": 4096, "num_heads_q": 8, "num_heads_kv": 2} | changes)


def tiles(given: Problem, device: Device = H200, needs: Needs | None = None) -> list[TileConfig]:
    return [x.tile for x in support.candidates(given, device, needs)]


def test_a_feature_of_pairs_has_the_smaller_tiles_alone() -> None:
    """Others were measured without one, and their registers and shared memory are full."""
    assert {x.forward for x in tiles(problem())} == {KernelConfig(64, 64, 4, 3)}
    for changes in ({"dropout": True}, {"features": PAIRS}, {"features": Features(alibi_slopes=True)}):
        assert {x.forward for x in tiles(problem(**changes))} == {KernelConfig(128, 64, 8, 3)}
        assert len({(x.dkdv, x.dq) for x in tiles(problem(**changes), needs=QKV)}) == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("widths", [(512, 512), (320, 320), (264, 512), (512, 64)])
def test_mma_sync_has_kernels_of_wide_heads(arch: str, widths: tuple[int, int]) -> None:
    device = A100._replace(arch=arch)
    given = problem(head_dim=widths[0], head_dim_v=widths[1])
    found = {x.forward for x in tiles(given, device) if x.forward.mma}
    assert found
    assert all(fits(given, device, x, "forward") for x in found)
    loops = {x.one_loop for x in tiles(given, device, QKV)} - {None}
    assert loops
    assert all(fits(given, device, x, "one loop") for x in loops)
    assert not any(x.tangents and x.tangents.mma for x, _ in candidates.tangents(given, device))


def test_other_chips_have_one_tile() -> None:
    for arch in ("sm_100", "gfx942"):
        for needs in (None, QKV):
            assert not any(x.forward.mma or x.one_loop for x in tiles(problem(), A100._replace(arch=arch), needs))
    assert len({x.forward for x in tiles(problem(), A100._replace(arch="gfx942"))}) == 1


@pytest.mark.parametrize("arch", [x for x in SHARED_MEMORY if x.startswith("sm_")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_few_rows_of_wide_heads_have_the_shared_memory(arch: str, dtype: torch.dtype) -> None:
    """Triton refuses other kernels when they are launched."""
    device = A100._replace(arch=arch)
    for width, group, rows in product((128, 256, 320, 512), (1, 3, 16, 128), (1, 5, 16, 64)):
        lengths = {"seqlen_q": rows, "seqlen_k": 64, "num_heads_q": group, "num_heads_kv": 1}
        given = problem(head_dim=width, head_dim_v=width, dtype=dtype, **lengths)
        assert all(fits(given, device, x.forward, "forward") for x in tiles(given, device)), (width, group, rows)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_mma_sync_has_kernels_of_its_own(arch: str, width: int) -> None:
    """Within the shared memory of the chip, and of what they can compute."""
    device = A100._replace(arch=arch)
    given = problem(head_dim=width, head_dim_v=width)
    forward = {x.forward for x in tiles(given, device) if x.forward.mma}
    loops = {x.one_loop for x in tiles(given, device, QKV)} - {None}
    assert forward
    assert loops
    for tile in forward:
        assert fits(given, device, tile, "forward")
    for changes in ({"alignment": 8}, {"dtype": torch.float32}, {"dropout": True}, {"head_dim": 257}):
        other = replace(given, **changes)
        assert not any(x.forward.mma for x in tiles(other, device))
        assert not any(x.one_loop for x in tiles(other, device, QKV))
    assert not any(x.one_loop for x in tiles(replace(given, deterministic=True), device, QKV))
    assert not any(x.one_loop for x in tiles(given, device, QKV._replace(alibi_slopes=True)))
    for x in tiles(given, device):  # for a caller's number of splits, and for results that are not aligned
        assert not x.forward.mma or (x.given_splits is not None and not x.given_splits.mma)


@pytest.mark.parametrize(("width", "rows"), [(128, 1), (64, 1), (80, 3), (128, 9), (64, 16), (256, 16)])
def test_decoding_with_given_splits_has_one_tile_whatever_is_in_the_batch(width: int, rows: int) -> None:
    """With `num_splits` given, bits depend neither on the batch nor on its lengths."""
    found = {
        tile.given_splits or tile.forward
        for batch in (1, 20, 64)
        for keys in (100, 1024, 65536)
        for tile in tiles(problem(batch=batch, seqlen_q=rows, seqlen_k=keys, head_dim=width, head_dim_v=width))
    }
    assert len(found) == 1


def warps_of(tile: KernelConfig, *, chained: int = 0) -> tuple[int, int]:
    """How Triton divides warps among 16 rows and 8 keys of scores: products that follow each other, the second one with
    `chained` columns, divide the longer side; of others, each doubling halves the side with more parts.
    """
    parts, warps = [tile.block_m // 16, tile.block_n // 8], [1, 1]
    if chained:
        return (tile.num_warps, 1) if tile.block_m >= max(tile.block_n, chained) else (1, tile.num_warps)
    while warps[0] * warps[1] < tile.num_warps:
        side = int(parts[0] < parts[1])
        warps[side], parts[side] = 2 * warps[side], max(parts[side] // 2, 1)
    return warps[0], warps[1]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_120"])
def test_batch_invariant_scores_have_one_order(arch: str) -> None:
    """Also where Triton sees in one layout alone that two products follow each other."""
    device = Device("cuda", arch, arch, 108)
    changes: list[dict[str, Any]] = [{}, {"features": PAIRS}, {"pages": Pages(16, True, True)}, {"alignment": 2}]
    for width, change in product((16, 64, 96, 128, 160, 256, 320, 512), changes):
        (tile,) = tiles(problem(head_dim=width, head_dim_v=width, batch_invariant=True, **change), device)
        assert warps_of(tile.forward) == warps_of(tile.forward, chained=width), (width, change)


@pytest.mark.parametrize(
    ("arch", "dtype", "holds"),
    [("sm_80", torch.float32, 256), ("sm_89", torch.float32, 160), ("sm_89", torch.bfloat16, 384),
     ("sm_90", torch.float32, 384)],
)  # fmt: skip
def test_second_derivatives_that_a_chip_has_no_memory_for(arch: str, dtype: torch.dtype, holds: int) -> None:
    """With a softcap, where weights of pairs are never in memory: tiles of keys as Triton 3.6 lays them out."""
    for width in (64, 128, 160, 256, 384, 512):
        given = problem(head_dim=width, head_dim_v=width, dtype=dtype, softcap=True)
        reason = support.declines_second(given, Device("cuda", arch, arch, 108), QKV, QKV)
        assert (reason is None) == (width <= holds), (width, reason)


@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_a_dense_cache_is_decoded_as_dense_keys_are(width: int) -> None:
    given = problem(batch=64, seqlen_q=1, seqlen_k=8192, head_dim=width, head_dim_v=width)
    cache = replace(given, layout="paged", pages=Pages(8192, several=False, in_rows=True))
    assert [x.forward for x in tiles(cache)] == [x.forward for x in tiles(given)]


def test_groups_share_a_tile_where_it_fits() -> None:
    def packed(heads: int, device: Device = H200) -> set[int]:
        return {x.pack_gqa for x in tiles(problem(seqlen_q=1, num_heads_q=heads, num_heads_kv=1), device)}

    assert packed(8) == packed(8, A100) == {8}
    assert packed(71) == {71}
    assert packed(71, A100) == packed(130) == {1}


def test_decoding_counts_the_batch_nearly_as_it_is() -> None:
    """100 programs are not counted as 160, nor 160 as 256."""
    few = problem(seqlen_q=1)
    assert [replace(few, batch=n).bucketed().batch for n in (1, 5, 9, 17, 33, 65)] == [1, 5, 9, 18, 36, 72]
    assert replace(few, batch=5, seqlen_q=17).bucketed().batch == 8


@pytest.mark.parametrize("changes", [{"batch": 0}, {"seqlen_k": 0}, {"batch": 0, "seqlen_k": 0}, {"seqlen_q": 0}])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("needs", [None, QKV])
def test_nothing_has_a_plan(changes: dict[str, int], paged: bool, needs: Needs | None) -> None:
    for rows in (1, 300):
        given = problem(**{"seqlen_q": rows} | changes)
        if paged:
            given = replace(given, layout="paged", pages=Pages(16, True, True))
        assert tiles(given.bucketed(), needs=needs)


def test_one_warp_has_no_pages() -> None:
    """It lacks registers for their addresses."""
    fine = {x.forward for x in tiles(problem(seqlen_q=4, head_dim=64, head_dim_v=64))}
    paged = {
        x.forward
        for x in tiles(problem(seqlen_q=4, head_dim=64, head_dim_v=64, layout="paged", pages=Pages(16, True, True)))
    }
    assert few_rows.ONE_WARP in fine
    assert few_rows.ONE_WARP not in paged


@pytest.mark.parametrize(
    ("rows", "keys", "width", "walks"),
    [
        (49, 49, 64, {None, "keys"}), (128, 64, 64, {None}), (128, 128, 64, set()), (64, 128, 128, set()),
        (7, 4096, 64, {"keys"}), (4096, 7, 16, {"rows"}), (200, 200, 32, {"rows", "keys"}), (4096, 77, 64, set()),
    ],
)  # fmt: skip
def test_few_rows_and_few_keys_may_be_one_block_in_backward(
    rows: int, keys: int, width: int, walks: set[str | None]
) -> None:
    def found(device: Device = H200, **changes: Any) -> set[str | None]:
        given = {"head_dim": width, "head_dim_v": width, "num_heads_kv": 8, "seqlen_q": rows, "seqlen_k": keys}
        return {x.fused.walk for x in tiles(problem(**given | changes), device, QKV) if x.fused is not None}

    assert found() == walks
    assert found(A100) <= {None}  # walks were measured on other chips
    assert found(layout="varlen") == walks & {None}
    for others in (
        {"num_heads_kv": 2},
        {"seqused_q": True, "layout": "varlen"},
        {"dtype": torch.float32},
        {"alignment": 2},
    ):
        assert not found(**others)


def test_biases_of_few_features_have_tiles_of_their_own() -> None:
    """But for short sequences, few rows, other features, wide heads, and biases broadcast over rows or keys."""
    bias = Features(bias=(True, False, False, False))
    few = {"head_dim": 32, "head_dim_v": 32, "seqlen_q": 256, "seqlen_k": 256, "features": bias}

    def own(device: Device = H200, **changes: Any) -> bool:
        return any(x[:3] == tables.BIASED[1:] for x in tiles(problem(**few | changes), device, QKV))

    assert own()
    for changes in (
        {"head_dim": 48}, {"head_dim_v": 48}, {"seqlen_q": 4}, {"seqlen_k": 64}, {"dropout": True}, {"alignment": 2},
        {"features": Features(bias=(True, False, True, False))}, {"features": bias._replace(mask=(True,) * 4)},
        {"dtype": torch.float32},
    ):  # fmt: skip
        assert not own(**changes)
    assert not own(A100)


def test_the_gradient_of_a_bias_has_its_own_tile() -> None:
    for head_dim, tile in ((48, (64, 64, 4, 2)), (96, (64, 128, 8, 2)), (128, (64, 128, 8, 2))):
        found = tiles(problem(head_dim=head_dim, head_dim_v=head_dim), needs=QKV)
        assert {x.dbias for x in found} == {KernelConfig(*tile, bias_once=head_dim > 64)}
    for device, head_dim in ((A100, 64), (H200, 192)):
        plain = tiles(problem(head_dim=head_dim), device, QKV)[0]
        assert plain.dbias is not None
        assert plain.dbias.num_stages == 1


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, (False, True)),
        ({"window": Window(None, 0)}, (False, True)),
        ({"features": Features(mask=(False, True, False, False))}, (False, True)),
        ({"mask_mod": mock.sentinel.formula}, (False, True)),
        ({"deterministic": True}, (False, False)),
        ({"dropout": True, "octet_start": 3}, (False, False)),
        ({"head_dim": 256, "head_dim_v": 256}, (False, False)),
        ({"head_dim": 500, "head_dim_v": 500, "dtype": torch.float32}, (False, False)),
        ({"dtype": torch.float32, "head_dim": 160, "head_dim_v": 160}, (True, True)),
        ({"dtype": torch.float32, "head_dim": 128, "head_dim_v": 128}, (False, False)),
        ({"layout": "varlen"}, (False, False)),
        ({"seqlen_k": 2**16 + 1}, (False, False)),
    ],
)
def test_pytorch_may_multiply_wide_heads(changes: dict[str, Any], passes: tuple[bool, bool]) -> None:
    given = problem(**{"head_dim": 512, "head_dim_v": 512, "seqlen_q": 2048, "seqlen_k": 2048, "batch": 1} | changes)
    forward, backward = tiles(given), tiles(given, needs=QKV)
    assert any(x.products is not None for x in forward) == passes[0]
    assert any(x.products_backward is not None for x in backward) == passes[1]
    for found in (forward, backward):  # and these kernels may, too
        assert any(x.products is x.products_backward is None for x in found)
    assert not any(x.products or x.products_backward for x in tiles(given, A100) + tiles(given, A100, QKV))


def test_misaligned_rows_have_no_warpgroup_products_where_they_decode() -> None:
    """ptxas 12.8 miscompiles some of them in tiles of 64 rows."""
    few = problem(head_dim=40, head_dim_v=1, seqlen_q=16, alignment=2)
    assert {x.forward.block_m for x in tiles(few)} == {32}
    assert 64 in {x.forward.block_m for x in tiles(replace(few, alignment=16))}


def test_one_product_of_tf32_has_other_tiles_than_six_of_bfloat16() -> None:
    float32 = problem(dtype=torch.float32, head_dim=64, head_dim_v=64, num_heads_kv=8)
    found = [candidates.by_tf32(x) for x in tiles(float32, needs=QKV)]
    assert tables.TF32_DKDV in {x.dkdv for x in found}
    assert "bf16x6" not in {y.precision for x in found for y in (x.dkdv, x.dq)}


def test_gradients_that_triton_cannot_compile_are_declined() -> None:
    """Triton 3.9 fails on a condition in shared memory for gfx950, 3.8 does not."""
    masked = Features(mask=(True, True, True, True))
    for arch, version, features, declined in (
        ("gfx950", (3, 9), masked, True), ("gfx950", (3, 8), masked, False),
        ("gfx942", (3, 9), masked, False), ("gfx950", (3, 9), Features(), False),
    ):  # fmt: skip
        described = problem(features=features)
        with mock.patch.object(support, "triton_version", return_value=version):
            reason = support.declines_backward(described, Device("cuda", arch, arch, 100), QKV)
        assert (reason is not None) == declined


def test_float32_gradients_that_no_tile_holds_are_declined() -> None:
    """Counted by compilers: 130 KiB at 512 features, 98 at 384."""
    for arch, widths, declined in (
        ("sm_89", (512, 512), True), ("sm_120", (320, 512), True), ("sm_89", (384, 384), False),
        ("sm_89", (512, 128), False), ("sm_80", (512, 512), False), ("gfx942", (512, 512), False),
    ):  # fmt: skip
        given = problem(dtype=torch.float32, head_dim=widths[0], head_dim_v=widths[1])
        reason = support.declines_backward(given, Device("cuda", arch, arch, 100), QKV)
        assert (reason is not None) == declined, (arch, widths, reason)
        half = replace(given, dtype=torch.bfloat16)
        assert support.declines_backward(half, Device("cuda", arch, arch, 100), QKV) is None
