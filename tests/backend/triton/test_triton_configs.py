"""The configurations chosen for problems. Needs neither Triton nor a GPU."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from calls import dense_call

from flashtile.backend.triton import configs, decode_times, support
from flashtile.backend.triton import decoding as decode_tiles
from flashtile.backend.triton.configs import HALF, SMALL
from flashtile.backend.triton.tile_config import FusedConfig, KernelConfig, TileConfig
from flashtile.call.call import Features, Needs
from flashtile.call.device import Device
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import Window

H100 = Device("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132)
H200, A100 = Device("cuda", "H200", "sm_90", 132), Device("cuda", "A100", "sm_80", 108)


def problem(**changes: Any) -> Problem:
    plain = replace(Problem.describe(dense_call(torch.bfloat16)), head_dim=128, head_dim_v=128, alignment=16)
    return replace(plain, seqlen_q=4096, seqlen_k=4096, num_heads_q=8, num_heads_kv=2, **changes)


@pytest.mark.parametrize(
    "changes",
    [{"softcap": True}, {"dropout": True}, {"window": Window(1024, 0)}, {"window": Window(1024, 1024)}],
)
def test_work_between_products_takes_small_tiles_of_forward(changes: dict[str, Any]) -> None:
    plain = HALF[227][1]
    found = configs.tile(problem(**changes), H200)
    assert found[:3] == (SMALL, plain.dkdv, plain.dq)
    for device, more in ((A100, {}), (H200, {"head_dim": 256, "head_dim_v": 256}), (H200, {"dtype": torch.float32})):
        assert configs.tile(problem(**changes | more), device).forward != SMALL
    for features in (Features(alibi_slopes=True), Features(bias=(True,) * 4), Features(mask=(True,) * 4)):
        assert configs.tile(problem(**changes, features=features), H200).forward == KernelConfig(128, 64, 8, 3)


def test_float32_takes_small_tiles_where_large_ones_leave_cores_idle() -> None:
    """Measured on an H100 (docs/journal/2026-11-26-forms.md)."""

    def chosen(heads: int, seqlen: int, width: int = 64, **changes: Any) -> list[tuple[int, int]]:
        changes |= {"batch": 1, "dtype": torch.float32, "head_dim": width, "head_dim_v": width}
        plain = replace(problem(), num_heads_q=heads, num_heads_kv=heads, seqlen_q=seqlen, seqlen_k=seqlen, **changes)
        return [x[:2] for x in configs.tile(plain.bucketed(), H200)[:3]]

    # forward, dk and dv, dq
    assert chosen(24, 700) == [(64, 64), (64, 64), (64, 64)]
    assert chosen(12, 700) == [(32, 64), (64, 64), (64, 64)]
    assert chosen(24, 512) == chosen(160, 1024) == [(128, 64), (64, 64), (128, 64)]
    assert chosen(32, 100) == [(32, 64), (32, 32), (32, 32)]
    assert chosen(32, 100, 40) == [(64, 64), (32, 32), (64, 64)]
    assert chosen(64, 100, 32) == [(64, 64), (32, 64), (64, 64)]
    assert chosen(64, 256, 32) == [(128, 64), (32, 64), (128, 64)]
    for others in ({"layout": "varlen"}, {"dropout": True}):
        assert (32, 64) not in chosen(12, 100, **others)


def test_short_sequences_and_large_groups() -> None:
    """One stage where nothing is loaded ahead; groups over 64 heads in one tile where it fits."""

    def chosen(seqlen: int, heads_kv: int = 8, device: Device = H200, **changes: Any) -> TileConfig:
        return configs.tile(
            replace(problem(), seqlen_q=seqlen, seqlen_k=seqlen, num_heads_kv=heads_kv, **changes), device
        )

    assert {x.num_stages for x in chosen(64)[:3]} == {1}
    for others in ({"head_dim_v": 512}, {"layout": "varlen"}, {"dropout": True}):
        assert 1 not in {x.num_stages for x in chosen(64, **others)[:1]}
    assert {x.num_stages for x in chosen(65)[:3]} != {1}
    few = {"seqlen_k": 4096, "num_heads_q": 71, "num_heads_kv": 1}
    one = replace(problem(), seqlen_q=1)
    assert configs.tile(replace(one, **few), H200).pack_gqa == 71
    assert configs.tile(replace(one, **few), A100).pack_gqa == 1
    assert configs.tile(replace(one, **few | {"num_heads_q": 130}), H200).pack_gqa == 1


def fused(rows: int, keys: int, device: Device = H200, **changes: Any) -> FusedConfig | None:
    given = {"head_dim": 64, "head_dim_v": 64, "num_heads_kv": 8} | changes
    return configs.tile(replace(problem(), seqlen_q=rows, seqlen_k=keys, **given), device).fused


def test_biases_of_few_features_have_tiles_of_their_own() -> None:
    """But for short sequences, few rows, other features, wide heads, and biases broadcast over rows or keys."""
    bias = Features(bias=(True, False, False, False))
    few = {"head_dim": 32, "head_dim_v": 32, "seqlen_q": 256, "seqlen_k": 256, "features": bias}

    def chosen(device: Device = H200, **changes: Any) -> TileConfig:
        return configs.tile(replace(problem(), **few | changes), device)

    assert chosen()[:3] == configs.BIASED[1:]
    for changes in (
        {"head_dim": 48}, {"head_dim_v": 48}, {"seqlen_q": 4}, {"seqlen_k": 64}, {"dropout": True}, {"alignment": 2},
        {"features": Features(bias=(True, False, True, False))}, {"features": bias._replace(mask=(True,) * 4)},
        {"dtype": torch.float32},
    ):  # fmt: skip
        assert chosen(**changes)[:3] != configs.BIASED[1:]
    assert chosen(A100)[:3] != configs.BIASED[1:]


def test_sequences_that_are_one_tile_in_backward() -> None:
    def chosen(rows: int, keys: int, device: Device = H200, **changes: Any) -> tuple[int, ...] | None:
        found = fused(rows, keys, device, **changes)
        return None if found is None or found.walk is not None else found.tile[:4]

    assert chosen(49, 49) == chosen(49, 49, batch=100, head_dim=128) == (64, 64, 4, 2)
    assert chosen(32, 100) == (32, 128, 4, 2)
    assert chosen(49, 49, A100) == (64, 64, 4, 1)
    assert chosen(49, 49, batch=1, head_dim=128) == (64, 64, 8, 1)
    assert chosen(3, 20) == (16, 32, 4, 1)
    assert chosen(128, 64) == (128, 64, 4, 2)
    for others in ({"num_heads_kv": 2}, {"layout": "varlen"}, {"dtype": torch.float32}, {"alignment": 2}):
        assert chosen(49, 49, **others) is None
    assert chosen(128, 128) is chosen(64, 128, head_dim=128) is chosen(16, 16, A100, head_dim=80) is None


def test_few_rows_and_few_keys_are_one_block_in_backward() -> None:
    def chosen(rows: int, keys: int, width: int = 32, device: Device = H200, **changes: Any) -> tuple[Any, ...] | None:
        found = fused(rows, keys, device, **{"batch": 16, "head_dim": width, "head_dim_v": width} | changes)
        return None if found is None else (found.walk, *found.tile[:2], found.splits)

    assert chosen(7, 4096) == ("keys", 16, 128, 4)
    assert chosen(7, 4096, 64) == ("keys", 16, 64, 4)
    assert chosen(7, 4096, batch=1) == ("keys", 16, 128, 16)
    assert chosen(15, 257, 64, batch=64) == ("keys", 16, 64, 1)  # and not one tile of 16 x 512
    assert chosen(32, 257, 64, batch=64) == ("keys", 32, 64, 1)
    assert chosen(64, 512, 64, batch=64) == ("keys", 64, 64, 1)
    assert chosen(64, 512, 128) == ("keys", 64, 32, 2)
    assert chosen(100, 1024) == ("keys", 128, 64, 2)
    assert chosen(200, 200) == ("rows", 64, 256, 1)
    assert chosen(200, 200, 50) == ("keys", 256, 64, 1)
    assert chosen(4096, 7, 16) == ("rows", 128, 16, 4)
    assert chosen(100, 1024, 64) is chosen(200, 1024) is chosen(4096, 77) is chosen(7, 4096, device=A100) is None
    assert fused(64, 512, dropout=True) == FusedConfig(KernelConfig(64, 64, 4, 1), "keys", 4)
    assert chosen(100, 1024, dropout=True) is None
    for others in ({"num_heads_kv": 2}, {"layout": "varlen"}, {"dtype": torch.float32}, {"alignment": 2}):
        assert chosen(49, 4096, **others) is None


def test_the_gradient_of_a_bias_has_its_own_tile() -> None:
    for head_dim, tile in ((48, (64, 64, 4, 2)), (96, (64, 128, 8, 2)), (128, (64, 128, 8, 2))):
        found = configs.tile(replace(problem(), head_dim=head_dim, head_dim_v=head_dim), H200).dbias
        assert found == KernelConfig(*tile, bias_once=head_dim > 64)
    for device, head_dim in ((A100, 64), (H200, 192)):
        found = configs.tile(replace(problem(), head_dim=head_dim), device)
        assert found.dbias == found.dq._replace(num_stages=1)


@pytest.mark.parametrize("window", [Window(4096, 0), Window(1024, None), Window(None, 0), Window(1024, 2048)])
def test_long_windows_keep_the_large_tile(window: Window) -> None:
    assert configs.tile(problem(window=window), H200) == configs.tile(problem(), H200)


def decoding(batch: int, heads: int, heads_kv: int, keys: int, width: int, **changes: Any) -> Problem:
    given = {"seqlen_q": 1, "seqlen_k": keys, "head_dim": width, "head_dim_v": width} | changes
    return replace(problem(), batch=batch, num_heads_q=heads, num_heads_kv=heads_kv, **given)


def test_decoding_with_given_splits_has_one_tile_whatever_is_in_the_batch() -> None:
    """With `num_splits` given, bits depend neither on the batch nor on its lengths."""
    for width, rows, expected in (
        (128, 1, (8, 64, 4, 4)),
        (64, 1, (8, 128, 4, 4)),
        (80, 3, (16, 64, 4, 4)),
        (128, 9, (64, 64, 4, 3)),
    ):
        found = [
            configs.tile(decoding(batch, 8, 2, keys, width, seqlen_q=rows), H200)
            for batch in (1, 20, 64)
            for keys in (100, 1024, 65536)
        ]
        assert {x.given_splits or x.forward for x in found} == {KernelConfig(*expected)}
    one = problem(features=Features(bias=(True,) * 4))
    assert configs.tile(replace(one, seqlen_q=1), H200).forward == KernelConfig(16, 64, 4, 3)
    assert configs.tile(replace(problem(), seqlen_q=1), A100).forward == KernelConfig(16, 64, 4, 2)


@pytest.mark.parametrize(
    ("call", "expected", "splits"),
    [
        ((1, 14, 2, 4096, 64), (8, 128, 4, 3), 16),  # a program alone on its core
        ((16, 12, 12, 1024, 64), (8, 64, 2, 3), 1),  # more tiles than cores, with enough bytes in flight
        ((5, 20, 20, 1500, 64), (8, 128, 4, 3), 1),  # fewer
        ((128, 16, 16, 512, 64), (8, 128, 4, 3), 1),  # several waves
        ((3, 32, 32, 2048, 80), (8, 64, 2, 3), 1),  # two chunks of features
        ((8, 8, 1, 131072, 128), (8, 64, 4, 3), 16),  # a program for each core, if that takes no more time
        ((64, 32, 8, 8192, 128), (8, 128, 4, 3), 1),
        ((1, 8, 1, 131072, 256), (8, 64, 4, 3), 48),  # merging the splits of a single head pays
        ((20, 48, 4, 3000, 128), (16, 128, 4, 3), 1),  # groups of more than 8 rows
        ((32, 71, 1, 2048, 64), (64, 64, 4, 3), 4),  # two tiles of a group, which read the same keys
        ((1, 96, 1, 4096, 128), (128, 64, 8, 4), 16),  # not counted
    ],
)
def test_decoding_fills_the_chip(call: tuple[int, ...], expected: tuple[int, ...], splits: int) -> None:
    described = decoding(*call).bucketed()
    assert configs.tile(described, H100).forward == KernelConfig(*expected)
    assert support.num_splits(described, H100) == splits


def test_decoding_counts_the_batch_nearly_as_it_is() -> None:
    """100 programs are not counted as 160, nor 160 as 256."""
    assert [decoding(n, 20, 20, 1500, 64).bucketed().batch for n in (1, 5, 9, 17, 33, 65)] == [1, 5, 9, 18, 36, 72]
    assert replace(decoding(5, 20, 20, 1500, 64), seqlen_q=17).bucketed().batch == 8
    splits = [support.num_splits(decoding(n, 12, 12, 8192, 64).bucketed(), H100) for n in (5, 8)]
    assert splits == [2, 1]


def test_decoding_in_windows_counts_the_keys_that_are_visible() -> None:
    long = decoding(8, 64, 8, 8192, 64, window=Window(127, 0))
    assert support.num_splits(long.bucketed(), H100) == 1
    short, chunked = (decoding(1, 4, 4, 2**20, 64, window=Window(None, 0, chunk=n)) for n in (None, 256))
    assert [support.num_splits(x.bucketed(), H100) for x in (short, chunked)] == [32, 1]


def test_decoding_of_nothing_has_a_plan() -> None:
    paged = replace(decoding(0, 8, 2, 0, 64), layout="paged", pages=Pages(16, True, True))
    assert support.num_splits(paged.bucketed(), H100) == 1


def test_sequences_in_pages_are_split_since_their_lengths_differ() -> None:
    same = decoding(33, 32, 8, 6144, 128)
    paged = replace(same, layout="paged", pages=Pages(16, True, True))
    whole = replace(paged, pages=Pages(6144, False, True))
    assert [support.num_splits(x.bucketed(), H100) for x in (same, whole, paged)] == [1, 1, 4]


def test_pages_over_64_features_have_two_warps() -> None:
    same = decoding(16, 20, 2, 1024, 80)
    paged = replace(same, layout="paged", pages=Pages(16, True, True))
    assert [{tile.num_warps for tile in decode_times.tiles(x, 16)} for x in (same, paged)] == [{1, 2}, {2}]


def test_faster_memory_wants_more_splits() -> None:
    speculative = decoding(8, 32, 8, 8192, 128, seqlen_q=5)
    assert [support.num_splits(speculative, device) for device in (H100, H200)] == [2, 4]


def test_merges_are_counted_as_the_kernel_runs_them() -> None:
    pytest.importorskip("triton")
    from flashtile.backend.triton.kernels import combine

    assert (combine.MAX_UNROLL.value, combine.REGISTERS.value) == (decode_times.MAX_UNROLL, decode_times.REGISTERS)


def test_splits_of_long_calls_leave_one_program_to_a_core() -> None:
    """Also with a tuned tile of two warps, as small tiles of decoding have."""
    long = replace(problem(), batch=2, seqlen_q=512, num_heads_q=10, num_heads_kv=10)  # 80 programs
    tile = KernelConfig(128, 64, 2, 3, tuned=True)
    assert decode_tiles.num_splits(TileConfig(tile, tile, tile), long, H200) == 1


def test_blocks_of_keys_are_no_longer_than_pages() -> None:
    for page_size, block_n in ((16, 64), (64, 64), (128, 128), (256, 128)):
        paged = decoding(1, 32, 8, 8192, 128, layout="paged", pages=Pages(page_size, True, True))
        assert configs.tile(paged, H200).forward.block_n == block_n


def test_decoding_of_many_rows_leaves_room_for_two_programs() -> None:
    for rows, width, tile in (
        (16, 64, (16, 128, 4, 4)),
        (32, 64, (32, 64, 4, 3)),
        (64, 128, (64, 64, 4, 3)),
        (32, 256, (32, 16, 4, 3)),
    ):
        few = replace(problem(head_dim=width, head_dim_v=width), seqlen_q=rows, num_heads_kv=8)
        found = configs.tile(few, H200)
        assert (found.given_splits or found.forward) == KernelConfig(*tile)
    wide = replace(problem(head_dim=256, head_dim_v=256), seqlen_q=32, num_heads_kv=8, batch=6)
    assert support.num_splits(wide, H200) == 4  # two programs of a core, of tiles that are not counted


def test_wide_heads_of_float32_are_left_to_matrix_products() -> None:
    """By kernels between them on Hopper, where the heads are whole vectors, else by another backend."""

    def deferred(width: int = 512, seqlen: int = 2048, device: Device = A100, **changes: Any) -> bool:
        given = {"dtype": torch.float32, "head_dim": width, "head_dim_v": width} | changes
        call = replace(problem(), seqlen_q=seqlen, seqlen_k=seqlen, batch=1, num_heads_q=1, num_heads_kv=1, **given)
        return support.defers(call, device) is not None

    assert deferred()
    assert deferred(160, 4096)
    assert not deferred(device=H200)
    assert deferred(516, device=H200)
    for others in (
        {"width": 128},
        {"dtype": torch.bfloat16},
        {"seqlen": 512},
        {"layout": "varlen"},
        {"deterministic": True},
    ):
        assert not deferred(**others)
    assert not deferred(device=Device("cpu", "CPU", "x86_64", 2))


@pytest.mark.parametrize(
    ("changes", "products"),
    [
        ({}, (True, True)),
        ({"seqlen_q": 512, "seqlen_k": 512}, (False, True)),
        ({"window": Window(None, 0)}, (True, True)),
        ({"window": Window(15, 0)}, (False, False)),
        ({"window": Window(1023, 0)}, (False, True)),
        ({"seqlen_q": 1, "seqlen_k": 65536}, (False, True)),  # not counted as 64 rows
        ({"features": Features(mask=(False, True, False, False))}, (True, True)),
        ({"mask_mod": mock.sentinel.formula}, (False, True)),
        ({"num_heads_kv": 8, "head_dim": 264, "head_dim_v": 264}, (False, True)),
        ({"deterministic": True}, (False, False)),
        ({"dropout": True, "octet_start": 3}, (False, False)),
        ({"head_dim": 256, "head_dim_v": 256}, (False, False)),
        ({"layout": "varlen"}, (False, False)),
    ],
)
def test_wide_heads_of_half_precision(changes: dict[str, Any], products: tuple[bool, bool]) -> None:
    """Passes whose products are PyTorch's."""
    given = {"head_dim": 512, "head_dim_v": 512, "seqlen_q": 2048, "seqlen_k": 2048} | changes
    found = configs.tile(replace(problem(), batch=1, **given), H200)
    assert (found.products is not None, found.products_backward is not None) == products


def test_misaligned_rows_have_no_warpgroup_products_where_they_decode() -> None:
    """ptxas 12.8 miscompiles some of them in tiles of 64 rows."""
    few = replace(problem(head_dim=40, head_dim_v=1), seqlen_q=16, alignment=2)
    assert configs.tile(few, H200).forward.block_m == 32
    assert configs.tile(replace(few, alignment=16), H200).forward.block_m == 64


def test_gradients_that_triton_cannot_compile_are_declined() -> None:
    """Triton 3.9 fails on a condition in shared memory for gfx950, 3.8 does not."""
    qkv, masked = Needs(True, True, True), Features(mask=(True, True, True, True))
    for arch, version, features, declined in (
        ("gfx950", (3, 9), masked, True), ("gfx950", (3, 8), masked, False),
        ("gfx942", (3, 9), masked, False), ("gfx950", (3, 9), Features(), False),
    ):  # fmt: skip
        described = problem(features=features)
        with mock.patch.object(support, "triton_version", return_value=version):
            reason = support.declines_backward(described, Device("cuda", arch, arch, 100), qkv)
        assert (reason is not None) == declined
