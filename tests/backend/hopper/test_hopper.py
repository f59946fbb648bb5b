"""The Hopper backend without a GPU: what it supports, and the SASS of its kernels.

`pytest -m sass` compiles all kernels and examines the order of their instructions; by default, one problem for each
kernel is compiled.
"""

import functools
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from hopper_variants import BIAS_TILES, FEW, FLOAT32, LONG, SHORT, VARIANTS, call_of_family
from offline.compiled import Compiled, compile_launch
from offline.launches import Launch, hopper_launches_of

from flashtile import MaskMod
from flashtile.api.explain import described_call
from flashtile.backend.hopper import float32, listed, support, tables, tile_times
from flashtile.backend.hopper.bias_tiles import forward_tiles
from flashtile.backend.hopper.tables import ONE_WARPGROUP, THREE_WARPGROUPS, TWO_WARPGROUPS
from flashtile.call.call import Features, Needs
from flashtile.call.device import Device
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import Window
from flashtile.dispatch import planner
from flashtile.errors import BackendError
from flashtile.expression.formula import formula_of
from flashtile.expression.purity import MASK_MOD

H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
SHARED_MEMORY = 227 * 1024
CHOSEN = (
    ("full", 64, LONG), ("causal", 64, LONG), ("sinks", 128, SHORT), ("packed everything 64", 64, SHORT),
    ("causal", 96, SHORT), ("causal", 96, LONG), ("packed 256", 256, SHORT),
    ("causal", 80, SHORT), ("full", 80, LONG), ("causal", 160, SHORT), ("full", 64, FEW), ("full", 128, FEW),
    (BIAS_TILES, 32, SHORT), ("packed 64", 64, SHORT),
)  # fmt: skip
BACKWARD = (("packed 64", 64, SHORT), ("causal", 80, SHORT), ("packed 96", 96, SHORT), ("packed 128", 128, SHORT))
LATE_DQ = (("full", 64, 512), ("full", 96, 8192), ("causal", 64, 2048), ("causal", 80, 2048), ("causal", 96, 2048))
SPLIT_BACKWARD = (
    ("causal", (192, 128), SHORT), ("causal", 160, SHORT), ("full", 192, SHORT), ("packed 256", 256, SHORT),
)  # fmt: skip
BACKWARD_SPILL, FORWARD_SPILL = 150, 4  # most bytes of a thread
# Outside of inner loops, where `test_overlap_of_forward` accepts none.
MORE_FORWARD_SPILL = {
    ("packed everything 64", 64, SHORT): 8, ("causal", 96, LONG): 16, ("packed 256", 256, SHORT): 8,
    ("causal", 160, SHORT): 16,
}  # fmt: skip
SPLIT_BACKWARD_SPILL = {("causal", 160, SHORT): 4}  # others: 0
# Measured, with Triton 3.6 and with 3.9: mostly numbers of the tile (docs/design/hopper-float32.md).
FLOAT32_SPILL = {"float32_forward": (320, 850), "dq": (64, 200), "dkdv": (32, 500)}
NEWER_TRITON_SPILL = 32  # most bytes of a thread in forward
NEWER_TRITON_SPLIT_SPILL, NEWER_TRITON_LOADS = 16, 1  # in dq and dkdv; of spilled numbers in a step of forward
ONE_OF_EACH = (  # problem, kernel, most spilled bytes of a thread
    (("full", 64, SHORT), "forward", NEWER_TRITON_SPILL), (("full", 64, SHORT), "backward", BACKWARD_SPILL),
    (("full", (192, 128), SHORT), "dq", 0), (("full", (192, 128), SHORT), "dkdv", 0),
    (("float32 causal 128", 128, SHORT), "float32_forward", FLOAT32_SPILL["float32_forward"][1]),
)  # fmt: skip
SCALED = formula_of(lambda score, b, h, q_idx, k_idx: score * 0.5)[0]
SHOWN = formula_of(lambda b, h, q_idx, k_idx: q_idx % 8 >= k_idx % 8, role=MASK_MOD)[0]
PADDED = formula_of(lambda b, h, q_idx, k_idx: k_idx < 70 * (b + 1), role=MASK_MOD)[0]
OF_HEADS = formula_of(lambda b, h, q_idx, k_idx: k_idx < 70 * (h + 1), role=MASK_MOD)[0]
ADDED = formula_of(lambda score, b, h, q_idx, k_idx: score + h)[0]
CAPPED = formula_of(lambda score, b, h, q_idx, k_idx: 20 * torch.tanh(score / 20))[0]
pytestmark = pytest.mark.skipif(support.unsupported() is not None, reason=f"{support.unsupported()}")


def problem(**changes: object) -> Problem:
    return replace(Problem.describe(call_of_family("causal", 64, SHORT)), **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "bfloat16, float16 and float32"),
        ({"dtype": torch.float32, "head_dim": 32, "head_dim_v": 32}, "above 32"),
        ({"dtype": torch.float32, "head_dim": 128, "softcap": True}, "features but windows"),
        ({"layout": "paged", "pages": Pages(20, True, True)}, "multiples of 8"),
        ({"layout": "paged", "pages": Pages(16, True, False)}, "rows apart"),
        ({"layout": "paged", "pages": Pages(16, True, True), "leftpad_k": True}, "leftpad_k"),
        (
            {"layout": "paged", "pages": Pages(16, True, True), "features": Features(sinks=True, bias=(True,) * 4)},
            "biases",
        ),
        ({"head_dim": 264, "head_dim_v": 264}, "multiples of 8 up to 256"),
        ({"head_dim": 84}, "multiples of 8"),
        ({"seqused_q": True}, "seqused_q"),
        ({"dropout": True, "octet_start": 3}, "multiple of 8 keys"),
        ({"alignment": 8}, "16 bytes"),
        ({"seqlen_k": 0}, "empty"),
        ({"seqlen_q": 2**31}, "positions"),
    ],
)
def test_declines(changes: dict, reason: str) -> None:
    declined = support.declines(problem(**changes), H200)
    assert declined is not None
    assert reason in declined


def test_auto_defers_to_other_backends() -> None:
    changes, reason = {"seqlen_q": 16, "num_heads_q": 4, "num_heads_kv": 1}, "decoding"
    qkv = Needs(True, True, True)
    with mock.patch.multiple(support, unusable=lambda: None, triton_version=lambda: (3, 6)):
        assert support.declines(problem(**changes), H200) is None
        assert support.defers(problem(), H200) is None
        assert reason in str(support.defers(problem(**changes), H200))
        assert "softcap" in str(support.defers(problem(softcap=True), H200))
        float32 = {"dtype": torch.float32, "head_dim": 128, "head_dim_v": 128}
        assert support.defers(problem(**float32), H200) is None
        assert "launches" in str(support.defers(problem(**float32, seqlen_k=64), H200))
        float32 = {"dtype": torch.float32, "window": Window()}
        assert support.defers(problem(**float32), H200, qkv) is None
        assert support.defers(problem(dtype=torch.float32), H200, qkv) is None
        for changes_of_float32, needs in (({}, None), ({"window": Window(5, 5)}, qkv), ({"layout": "varlen"}, qkv)):
            assert "smaller tiles" in str(support.defers(problem(**float32 | changes_of_float32), H200, needs))
        narrow = {"head_dim": 32, "head_dim_v": 32, "seqlen_k": 2048}
        assert "32 and 2048 keys" in str(support.defers(problem(**narrow), H200))
        assert support.defers(problem(**narrow | {"seqlen_k": 2049}), H200) is None
        many = {"batch": 390, "num_heads_q": 8, "num_heads_kv": 8, "seqlen_q": 64, "seqlen_k": 64}
        for head_dim, needs, here in ((64, None, True), (96, None, False), (64, qkv, False), (128, qkv, True)):
            short = problem(**many | {"head_dim": head_dim, "head_dim_v": head_dim})
            assert (support.defers(short, H200, needs) is None) == here
            assert reason in str(support.defers(replace(short, batch=8), H200, needs))
        few = {"batch": 16, "num_heads_q": 8, "num_heads_kv": 8, "seqlen_q": 64, "seqlen_k": 4096}
        for head_dim, needs, here in ((96, qkv, True), (64, qkv, False), (96, None, True), (80, None, False)):
            cross = problem(**few | {"head_dim": head_dim, "head_dim_v": head_dim})
            assert (support.defers(cross, H200, needs) is None) == here
        few |= {"head_dim": 96, "head_dim_v": 96}
        for changes_of_few in ({"batch": 8}, {"batch": 17}, {"seqlen_k": 1000}):
            assert reason in str(support.defers(problem(**few | changes_of_few), H200))
        for changes_of_few in ({"batch": 1, "seqlen_k": 512}, {"seqlen_k": 64}):  # few blocks of keys, one tile
            assert reason in str(support.defers(problem(**few | changes_of_few), H200, qkv))
        filling = narrow | {"batch": 128, "num_heads_q": 8, "seqlen_q": 256, "seqlen_k": 256}
        biased = Features(bias=(False, True, True, True))
        assert support.defers(problem(**filling | {"seqlen_q": 512, "seqlen_k": 512}), H200) is None
        assert support.defers(problem(**filling, features=biased), H200) is None
        for changes_of_filling in ({"features": biased, "seqlen_q": 128}, {"features": biased, "batch": 16}):
            assert "smaller tiles" in str(support.defers(problem(**filling | changes_of_filling), H200))
            assert support.defers(problem(**filling | changes_of_filling), H200, qkv) is None
        one_block = problem(**filling | {"features": biased, "seqlen_q": 64})
        assert "smaller tiles" in str(support.defers(one_block, H200, qkv))
        for needs in (None, qkv):
            assert support.defers(problem(**filling), H200, needs) is None
            assert support.defers(problem(**filling | {"seqlen_k": 77}), H200, needs) is None
        assert support.defers(problem(**filling | {"seqlen_q": 200}), H200) is None
        assert "smaller tiles" in str(support.defers(problem(**filling | {"seqlen_q": 200}), H200, qkv))
        masked = Features(mask=(True, True, False, True))
        assert support.defers(problem(**narrow, features=masked), H200) is None
        assert support.defers(problem(**narrow | {"head_dim": 40}), H200) is None
        assert "16, narrower" in str(support.defers(problem(head_dim=16, head_dim_v=16, seqlen_k=8192), H200))
        long = {"mask_mod": SHOWN, "seqlen_q": 8192, "seqlen_k": 8192, "window": Window()}
        assert support.defers(problem(**long), H200) is None
        wide = long | {"head_dim": 192, "head_dim_v": 128}
        assert "hidden blocks" in str(support.defers(problem(**wide), H200))
        assert support.defers(problem(**wide | {"layout": "varlen"}), H200) is None
        assert "softcap" in str(support.defers(problem(score_mod=CAPPED), H200))
        for features in ({"score_mod": SCALED}, {"mask_mod": SHOWN}, {"score_mod": SCALED, "mask_mod": SHOWN}):
            assert support.declines(problem(**features), H200) is None
            assert support.defers(problem(**features), H200) is None
        for features in ({"softcap": True}, {"score_mod": CAPPED}):
            assert support.defers(problem(**features, head_dim=128, head_dim_v=128), H200) is None
        assert planner._plan.__wrapped__(problem(**changes), H200, "hopper", None).backend == "hopper"
        with mock.patch("flashtile.backend.triton.support.unusable", return_value=None):
            chosen = planner._plan.__wrapped__(problem(**changes), H200, "auto", None)
            assert chosen.backend == "triton"
            assert reason in dict(chosen.why)["hopper"]
            assert planner._plan.__wrapped__(problem(), H200, "auto", None).backend == "hopper"
            alibi = {"features": Features(alibi_slopes=True)}
            for changes in ({}, {"layout": "varlen"}, alibi, {"head_dim": 96, "head_dim_v": 96}):
                assert planner._plan.__wrapped__(problem(**changes), H200, "auto", qkv).backend == "hopper"
            chosen = planner._plan.__wrapped__(problem(softcap=True), H200, "auto", qkv)
            assert chosen.backend == "triton"
            assert "softcap" in dict(chosen.why)["hopper"]


@pytest.mark.parametrize(
    ("name", "features", "head_dim"),
    [("alibi_slopes", Features(alibi_slopes=True), 192), ("bias", Features(bias=(True, False, False, False)), 64)],
)
def test_another_backend_has_the_gradients_of_score_tensors(name: str, features: Features, head_dim: int) -> None:
    """A backend that is named computes all gradients or none."""
    changed = problem(features=features, head_dim=head_dim, head_dim_v=head_dim)
    needs = Needs(True, True, True, **{name: True})
    with (
        mock.patch.multiple(support, unusable=lambda: None, triton_version=lambda: (3, 6)),
        mock.patch("flashtile.backend.triton.support.unusable", return_value=None),
    ):
        chosen = planner._plan.__wrapped__(changed, H200, "auto", needs)
        assert chosen.backend == "hopper"
        assert chosen.rest is not None
        assert (chosen.rest.own, chosen.rest.needs) == (Needs(True, True, True), Needs(**{name: True}))
        assert chosen.rest.plan.backend == "triton"
        assert planner._plan.__wrapped__(changed, H200, "auto", Needs(**{name: True})).backend == "triton"
        with pytest.raises(BackendError, match=r"no gradient of"):
            planner._plan.__wrapped__(changed, H200, "hopper", needs)


@pytest.mark.parametrize("version", [(3, 6), (3, 7), (3, 8), (3, 9)])
def test_auto_takes_every_known_version_of_triton(version: tuple[int, int]) -> None:
    with mock.patch.multiple(support, triton_version=lambda: version, unusable=lambda: None):
        assert support.unsupported() is None
        for seqlen in (SHORT, LONG):  # two and three warpgroups
            known = problem(seqlen_q=seqlen, seqlen_k=seqlen)
            assert support.unknown_kernels(known, H200, None) is None
        assert planner._plan.__wrapped__(problem(), H200, "auto", None).backend == "hopper"


def test_old_versions_of_triton_are_refused() -> None:
    with mock.patch.object(support, "triton_version", return_value=(3, 5)):
        assert "need Triton 3.6 or newer; this is 3.5" in str(support.unsupported())


def test_accepts_hopper_only() -> None:
    assert support.declines(problem(), H200) is None
    assert "not for sm_100" in str(support.declines(problem(), H200._replace(arch="sm_100")))


def test_configurations_depend_on_the_keys_per_row() -> None:
    def chosen(name: str, head_dim: int, seqlen: int, version: tuple[int, int] = tables.NEWEST_3WG) -> object:
        with mock.patch.object(tables, "compiler_version", return_value=version):
            return support.tile(Problem.describe(call_of_family(name, head_dim, seqlen)), H200).forward.compiled

    assert chosen("full", 96, LONG, (3, 8)) == TWO_WARPGROUPS[96, 96]
    for dim in (80, 96):
        assert chosen("full", dim, LONG) == THREE_WARPGROUPS[dim, dim]
        assert chosen("causal", dim, 2048) == chosen("full", dim, SHORT) == TWO_WARPGROUPS[dim, dim]
    assert chosen("causal", 64, SHORT) == chosen("window", 64, LONG) == ONE_WARPGROUP[64, 64]
    assert chosen("softcap", 64, LONG) == TWO_WARPGROUPS[64, 64]
    assert chosen(BIAS_TILES, 32, SHORT) == ONE_WARPGROUP[32, 32]
    assert chosen(BIAS_TILES, 64, SHORT) == ONE_WARPGROUP[64, 64]
    assert chosen("full", 128, LONG) == TWO_WARPGROUPS[128, 128]


@pytest.mark.parametrize(
    ("head_dim", "shape", "causal", "tile"),
    [
        (32, (256, 8, 512, 512), False, (64, 64)),
        (64, (390, 8, 64, 64), False, (64, 64)),
        (64, (256, 12, 128, 128), False, (128, 128)),  # as long as the memory takes
        (64, (256, 12, 128, 128), True, (128, 128)),
        (64, (64, 6, 256, 256), True, (64, 64)),
        (64, (32, 12, 384, 384), False, (192, 128)),
        (64, (128, 12, 197, 197), False, (64, 64)),
        (64, (64, 12, 32, 257), False, (64, 64)),
        (64, (1, 16, 577, 577), False, (64, 128)),  # a core has at most two tiles
        (64, (8, 12, 577, 577), False, (64, 64)),
        (64, (8, 10, 4096, 77), False, (192, 64)),
        (64, (16, 12, 1024, 1024), True, (64, 64)),
        (64, (1, 12, 2048, 2048), True, (128, 128)),  # fewer tiles than programs
        (64, (2, 16, 4096, 4096), True, (192, 128)),
        (64, (2, 16, 4096, 4096), False, (192, 128)),
        (72, (32, 16, 256, 256), False, (128, 128)),
        (72, (32, 16, 729, 729), False, (192, 64)),
        (80, (64, 16, 257, 257), False, (192, 64)),
        (80, (32, 16, 512, 512), False, (128, 128)),
        (80, (32, 16, 577, 577), False, (128, 128)),
        (80, (2, 16, 4096, 4096), False, (128, 128)),  # fewer whole waves
        (88, (2, 16, 4096, 4096), False, (192, 64)),  # fewer requests to the L2 cache
        (88, (2, 16, 2048, 2048), True, (192, 64)),
        (96, (2, 64, 2048, 2048), True, (128, 128)),
        (104, (2, 16, 4096, 4096), True, (192, 64)),
        (40, (8, 16, 1024, 1024), False, (192, 128)),
        (32, (4, 16, 2048, 2048), False, (64, 64)),
        (128, (8, 25, 1025, 1025), False, (192, 64)),
        (128, (2, 32, 4096, 4096), True, (128, 128)),
        (128, (32, 16, 576, 576), False, (192, 64)),
        (128, (32, 16, 577, 577), False, (128, 128)),
    ],
)
def test_dense_calls_take_the_fastest_tiles(
    head_dim: int, shape: tuple[int, int, int, int], causal: bool, tile: tuple[int, int]
) -> None:
    """Measured on an H100 (docs/journal/2026-11-25-short-rows.md, -programs.md, -requests.md, -26-odd-shapes.md)."""
    batch, heads, rows, keys = shape
    q, k = (torch.empty(batch, heads, n, head_dim, dtype=torch.bfloat16, device="meta") for n in (rows, keys))
    call = described_call(q, k, k, None, None, {"causal": causal})
    with mock.patch.object(tables, "compiler_version", return_value=tables.NEWEST_3WG):
        forward = support.tile(Problem.describe(call).bucketed(), H200).forward
    assert (forward.block_m, forward.block_n) == tile


def test_tiles_that_are_alike_fill_whole_waves() -> None:
    """11 x 132 tiles on 132 cores take the time of 11, whatever the rounding of sums."""
    [timed] = [x for x in tables.TIMED[96, 96] if x.config is TWO_WARPGROUPS[96, 96]]
    for blocks in range(11, 16):
        rows = blocks * timed.config.block_m
        q = torch.empty(2, 66, rows, 88, dtype=torch.bfloat16, device="meta")
        p = Problem.describe(described_call(q, q, q, None, None, {}))
        assert tile_times.time(p, H200, timed) == blocks * tile_times.tile_time(p, timed, 0, rows, rows)


def test_factors_and_padding_take_three_warpgroups() -> None:
    """Other functions need more registers or waste more rows; few pairs have no bits."""

    def chosen(**functions: object) -> object:
        return tables.tile_config(problem(**{"seqlen_q": LONG, "seqlen_k": LONG} | functions), H200).forward

    filling = {"window": Window(), "num_heads_q": 64}
    assert chosen(**filling) is chosen(score_mod=SCALED, **filling) is THREE_WARPGROUPS[64, 64]
    assert chosen(mask_mod=PADDED, **filling) is THREE_WARPGROUPS[64, 64]
    others = ({"score_mod": ADDED}, {"mask_mod": SHOWN}, {"mask_mod": OF_HEADS})
    for functions in (*others, {"score_mod": SCALED, "mask_mod": PADDED}, {"mask_mod": PADDED, "seqlen_q": 1}):
        assert chosen(**functions) is TWO_WARPGROUPS[64, 64]


def test_padding_without_bits_takes_two_warpgroups() -> None:
    """A plan of several lengths expects bits of some calls that are too small for them, or whose keys are split."""
    q, mask = torch.empty(3, 2, 300, 64, dtype=torch.bfloat16), torch.ones(3, 1, 1, 300, dtype=torch.bool)
    call = described_call(q, q, q, None, None, {"mask": mask})
    three, two = THREE_WARPGROUPS[64, 64], TWO_WARPGROUPS[64, 64]
    assert forward_tiles(call, three)[0] is two
    with mock.patch.object(listed, "LEAST_MASK_PAIRS", 0):
        assert forward_tiles(call, three)[0] is three
        assert forward_tiles(call, three.with_splits(2))[0] == two.with_splits(2)


def test_biases_with_unaligned_rows_are_copied_where_enough_pairs_share_them() -> None:
    """Once in each pass, or in backward alone; not of 32 bits, with aligned rows or for kernels without tiles."""

    def copies(bias: torch.Tensor, batch: int = 3, width: int = 64) -> int:
        q, k = (torch.empty(batch, 2, n, width, dtype=torch.bfloat16) for n in (130, bias.shape[3]))
        launches = hopper_launches_of(described_call(q, k, k, None, None, {"bias": bias}))
        return [launch.name for launch in launches].count("align_rows")

    bias = torch.empty(1, 2, 130, 133, dtype=torch.bfloat16)
    assert copies(bias) == copies(bias, width=128) == 2
    assert copies(bias, batch=1) == copies(bias.repeat(3, 1, 1, 1)) == 1
    aligned = torch.empty(1, 2, 130, 136, dtype=torch.bfloat16)[..., :133]
    strides = 2 * 130 * 134 + 1, 130 * 134, 134, 1  # that of a single sequence is never used
    assert copies(bias.new_empty(2 * 130 * 134).as_strided((1, 2, 130, 134), strides)) == 2
    assert copies(bias.float()) == copies(aligned) == copies(bias, width=192) == copies(bias[:, :, :1]) == 0


def test_warpgroups_that_read_a_bias_have_registers() -> None:
    def programs(batch: int, rows: int, bias: torch.Tensor | None = None) -> tuple[int, int]:
        q = torch.empty(batch, 2, rows, 64, dtype=torch.bfloat16, device="meta")
        given = torch.empty(batch, 2, rows, rows, dtype=torch.bfloat16, device="meta") if bias is None else bias
        config = forward_tiles(described_call(q, q, q, None, None, {"bias": given}), ONE_WARPGROUP[64, 64])[0]
        return config.num_warpgroups, config.programs_per_core

    assert programs(1, 136) == (1, 3)  # in tiles
    assert programs(1, 131) == programs(44, 131) == (1, 2)
    assert programs(45, 131) == (2, 1)  # too many tiles for two programs of each core
    assert programs(1, 131, torch.empty(1, 2, 131, 131, device="meta")) == (2, 1)


def test_few_heads_of_few_rows_are_left_to_one_kernel_in_backward() -> None:
    """Where whole waves of heads take less time than tiles of 128 keys: measured on an H100
    (docs/journal/2026-11-26-forms.md).
    """

    def left(heads: int, rows: int, keys: int | None = None, **changes: object) -> bool:
        lengths = {"seqlen_q": rows, "seqlen_k": keys or rows, "num_heads_q": heads, "num_heads_kv": heads}
        given = problem(**{"head_dim": 64, "head_dim_v": 64, "window": Window(), "batch": 1} | lengths | changes)
        return support.defers(given, H200, Needs(q=True, k=True, v=True)) is not None

    assert all(left(*shape) for shape in ((128, 256), (256, 144), (264, 197), (1024, 144), (264, 250, 130)))
    assert not any(left(*shape) for shape in ((192, 256), (1536, 197), (256, 128), (264, 300)))
    for changes in ({"window": Window(right=0)}, {"num_heads_kv": 64}, {"head_dim": 80}, {"dropout": True}):
        assert not left(256, 144, **changes)


def test_splits_fill_the_device() -> None:
    """Few rows or keys, and grouped heads whose diagonal makes tiles uneven; not what fills the device anyway."""

    def chosen(
        seqlen_q: int, seqlen_k: int, causal: bool = False, heads: tuple[int, int] = (8, 8), width: int = 64,
        **settings: object,
    ) -> tuple[int, int]:  # fmt: skip
        tensors = [
            torch.empty(1, h, n, width, dtype=torch.bfloat16, device="meta")
            for h, n in zip(heads, (seqlen_q, seqlen_k), strict=True)
        ]
        call = described_call(tensors[0], tensors[1], tensors[1], None, None, {"causal": causal} | settings)
        config = support.tile(Problem.describe(call), H200)
        return support.num_splits(Problem.describe(call), H200), config.backward.splits

    assert chosen(512, 50_000)[0] >= 4
    assert chosen(4096, 77)[1] >= 4
    unevenly = (8192, 8192, False)
    assert chosen(*unevenly, (7, 1))[0] > 1
    assert chosen(*unevenly, (7, 7))[0] == 1  # the last wave alone is split
    assert chosen(*unevenly, (7, 1), mask=MaskMod(lambda b, h, i, j: 2 * i >= j))[0] == 1  # splits have no lists
    assert chosen(4096, 4096, True, (64, 1), deterministic=True)[1] >= 4  # else a call chooses
    assert chosen(8192, 8192, True, (32, 8)) == chosen(16384, 16384, False, (32, 32)) == (1, 1)
    assert chosen(8192, 8192, True, (32, 8), 128, deterministic=True)[1] == 1
    assert chosen(2**17, 2**17, False, (32, 8), 128)[1] == 1  # splits save 1% by count, and lose the L2 cache


def test_heads_at_once_are_at_most_those_of_the_call() -> None:
    """Times a head's blocks of keys they have to fit 32 bits, and of few rows the L2 cache holds thousands."""
    q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16) for n in (1, 300))
    call = described_call(q, k, k, None, None, {"mask": MaskMod(lambda b, h, i, j: 2 * i >= j)})
    with mock.patch.object(listed, "LEAST_PAIRS", 0):
        backward = next(x for x in hopper_launches_of(call) if x.name == "backward")
    assert backward.arguments["lists"] is not None
    assert backward.arguments["l2_swizzle"] == 2


def test_long_rows_are_visited_in_chunks() -> None:
    """Without a mask, where programs keep in step."""

    def chosen(seqlen_q: int, seqlen_k: int = 8192, **settings: object) -> int:
        changes = {"window": Window(), "seqlen_q": seqlen_q, "seqlen_k": seqlen_k} | settings
        config = support.tile(problem(**changes), H200).backward
        return config.row_chunks  # type: ignore[union-attr]

    assert [chosen(n) for n in (2**15, 2**16, 2**16 + 1, 2**17, 2**20)] == [1, 1, 2, 2, 16]
    assert chosen(2**20, 512) == chosen(2**17, window=Window(right=0)) == chosen(2**17, mask_mod=SHOWN) == 1
    assert chosen(2**17, window=Window(right=0), deterministic=True) == 1


@pytest.mark.parametrize(("allowed", "parts"), [(False, 3), (True, 2)])
def test_parts_of_float32(allowed: bool, parts: int) -> None:
    with mock.patch.object(float32, "allows_tf32", return_value=allowed):
        launches = hopper_launches_of(call_of_family("float32 causal 128", 128, SHORT))
    configs = [x.arguments["CONFIG"] for x in launches if "CONFIG" in x.arguments]
    assert [x.head_dim.parts for x in configs] == [parts] * 5  # two launches split rows
    assert {x.arguments["q_desc"].block_shape[-1] for x in launches if "q_desc" in x.arguments} == {128}


def launch_of(family: tuple, name: str) -> Launch:
    [launch] = [launch for launch in hopper_launches_of(call_of_family(*family)) if launch.name == name]
    return launch


@functools.cache
def compiled(family: tuple, name: str) -> Compiled:
    return compile_launch(launch_of(family, name), "sm_90")


@pytest.mark.parametrize(("family", "name", "most_spilled"), ONE_OF_EACH)
def test_kernel_compiles(family: tuple, name: str, most_spilled: int) -> None:
    kernel = compiled(family, name)
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled is not None
    assert kernel.spilled <= most_spilled
    assert not kernel.serialized
    assert not kernel.unset


@pytest.mark.sass
@pytest.mark.parametrize("family", BACKWARD)
def test_backward_compiles_for_hopper(family: tuple) -> None:
    """Exponentials overlap dout's product with v. With early_half_exps, half of them follow the wait for the next
    scores, which are issued before dk.
    """
    launch, kernel = launch_of(family, "backward"), compiled(family, "backward")
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled is not None
    assert kernel.spilled <= BACKWARD_SPILL
    assert not kernel.serialized
    assert not kernel.unset
    config = launch.arguments["CONFIG"]
    chunks = len(config.head_dim.chunks)
    loops = inner_loops(kernel.sass, 6, ("HGMMA", "MUFU.EX2", "STL", "LDL"))
    steps = [order for order in loops if len(waits_in(order)) >= 5]
    assert len(steps) >= 2  # one for each warpgroup
    for order in steps:
        waits = waits_in(order)
        # Waits: dout's product with v, with and without masks; dv, with dq in flight; dq; the next scores; dk.
        # dq takes two wgmmas, the other products one for each chunk.
        assert [int(order[n][-1]) for n in waits] == [0, 0, 2, 2 * chunks, chunks, 0]
        products = [n for n, word in enumerate(order) if word == "HGMMA"]
        for first, last in ((-1, waits[0]), (waits[1], waits[2]), (waits[2], waits[3])):
            assert any(first < n < last for n in products)
        assert products[-1] < waits[3]
        late, early = (part.count("MUFU.EX2") for part in (order[: waits[0]], order[waits[4] :]))
        assert late + early == order.count("MUFU.EX2") > 0
        assert early == (late if config.early_half_exps else 0)


@pytest.mark.sass
@pytest.mark.parametrize("family", LATE_DQ)
def test_late_dq_compiles_for_hopper(family: tuple) -> None:
    """dq is added by fours, each aligned to 16 bytes: a thread's registers have an order of their own."""
    launch, kernel = launch_of(family, "backward"), compiled(family, "backward")
    assert launch.arguments["CONFIG"].late_dq
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled <= BACKWARD_SPILL
    assert not kernel.serialized
    assert not kernel.unset
    offsets = re.findall(r"REDG\.E\.ADD\.F32x4\S* desc\[\w+\]\[R\d+\.64(?:\+0x(\w+))?\]", kernel.sass)
    assert len(offsets) > 0
    assert all(int(offset or "0", 16) % 16 == 0 for offset in offsets)


@pytest.mark.sass
@pytest.mark.parametrize("family", SPLIT_BACKWARD)
def test_split_backward_compiles_for_hopper(family: tuple) -> None:
    """In dq, exponentials overlap dout's product with values; in dkdv, they stand between dv's two products, or overlap
    the next scores.
    """
    dq, dkdv = (compiled(family, name) for name in ("dq", "dkdv"))
    for kernel in (dq, dkdv):
        assert kernel.shared <= SHARED_MEMORY
        assert kernel.spilled is not None
        assert kernel.spilled <= (
            SPLIT_BACKWARD_SPILL.get(family, 0)
            if support.triton_version() == support.OLDEST
            else NEWER_TRITON_SPLIT_SPILL
        )
        assert not kernel.serialized
        assert not kernel.unset
    config = launch_of(family, "dkdv").arguments["CONFIG"]
    values, early = len(config.head_dim_v.chunks), config.keys_in_registers
    for sass, waits in ((dq.sass, [values, 0, 0]), (dkdv.sass, [values, 0] if early else [0, 0])):
        steps = inner_loops(sass, most_waits=3)
        assert len(steps) >= len(waits) - 1  # dq: one for each warpgroup; dkdv: only dv's
        for order in steps:
            at = [n for n, word in enumerate(order) if "DEPBAR" in word]
            assert [int(order[n][-1]) for n in at] == waits
            exponentials = [n for n, word in enumerate(order) if word == "MUFU.EX2"]
            first, last = (-1, at[0]) if early and sass is dkdv.sass else at[:2]
            assert first < exponentials[0] < exponentials[-1] < last


@pytest.mark.sass
@pytest.mark.parametrize("name", ["float32_forward", "dq", "dkdv"])
@pytest.mark.parametrize("family", [(name, VARIANTS[name].head_dim, SHORT) for name in FLOAT32])
def test_float32_compiles_for_hopper(family: tuple, name: str) -> None:
    kernel = compiled(family, name)
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled <= FLOAT32_SPILL[name][support.triton_version() != support.OLDEST]
    assert not kernel.serialized
    assert not kernel.unset


@pytest.mark.sass
@pytest.mark.parametrize("family", CHOSEN)
def test_compiles_for_hopper(family: tuple) -> None:
    kernel = compiled(family, "forward")
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled is not None
    assert kernel.spilled <= (
        MORE_FORWARD_SPILL.get(family, FORWARD_SPILL)
        if support.triton_version() == support.OLDEST
        else NEWER_TRITON_SPILL
    )
    assert not kernel.serialized
    assert not kernel.unset


@pytest.mark.sass
@pytest.mark.parametrize("family", CHOSEN)
def test_overlap_of_forward(family: tuple) -> None:
    """In each step, the products with keys and with values are in flight together. Speculative exponentials stand
    between the maxima and the branch for a changed row_max, before the wait for the values' product. Rescaling has a
    branch of its own.
    """
    config = launch_of(family, "forward").arguments["CONFIG"]
    loops = inner_loops(compiled(family, "forward").sass, first=("HGMMA", "LDL"))
    assert len(loops) == config.num_warpgroups  # one for each warpgroup
    for order in loops:
        waits, exponentials, maxima, products, votes, rescaling = (
            [n for n, word in enumerate(order) if kind in word]
            for kind in ("DEPBAR", "MUFU.EX2", "FMNMX", "HGMMA", "VOTE", "FMUL")
        )
        # Waits: the scores, with the products of all chunks of values in flight; then these.
        assert [order[n][-1] for n in waits] == [str(len(config.head_dim_v.chunks)), "0"]
        assert products[-1] < waits[0] < maxima[0]
        assert "STL" not in order
        assert order.count("LDL") <= (0 if support.triton_version() == support.OLDEST else NEWER_TRITON_LOADS)
        [vote] = votes
        assert vote < waits[1]
        branch = order.index("BRA", vote)
        assert sum(maxima[0] < n < branch for n in exponentials) >= config.speculative_exps
        assert "BRA" in order[rescaling[-1] - 1 - sum(config.head_dim_v.chunks) // 2 : rescaling[-1]]


def waits_in(order: list[str]) -> list[int]:
    """Positions of the waits for wgmmas."""
    return [n for n, word in enumerate(order) if "DEPBAR" in word]


def inner_loops(sass: str, most_waits: int = 2, first: tuple[str, ...] = ("HGMMA",)) -> list[list[str]]:
    """Instructions of the steps inside a tile: wgmmas, waits and softmax instructions, in order.

    Steps are the innermost loops with at most `most_waits` waits that begin with one of `first`. A retried wait for TMA
    also jumps back, out of the middle of a step.
    """
    lines, labels, steps = sass.splitlines(), {}, []
    for n, line in enumerate(lines):
        if (label := re.match(r"(\.L_x_\d+):", line.strip())) is not None:
            labels[label[1]] = n
        jump = re.search(r"BRA.*`\((\.L_x_\d+)\)", line)
        if jump is not None and jump[1] in labels:
            body = "\n".join(lines[labels[jump[1]] : n])
            order = re.findall(r"HGMMA|MUFU\.EX2|FMNMX|FMUL|VOTE\b|BRA|STL|LDL|WARPGROUP\.DEPBAR\.LE gsb0, 0x\d", body)
            while order[:1] == ["BRA"]:  # of waits for TMA
                del order[0]
            if order[:1] and order[0] in first and "MUFU.EX2" in order and len(waits_in(order)) <= most_waits:
                steps.append((labels[jump[1]], n, order))
    return [x[2] for x in steps if not any(y is not x and x[0] <= y[0] and y[1] <= x[1] for y in steps)]
