"""The Hopper backend without a GPU: what it supports, and its candidates for a call."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from forced import first, in_order
from hopper_variants import LONG, SHORT, call_of_family, tiles_of
from offline.launches import hopper_launches_of

from flashtile import MaskMod
from flashtile.api.explain import described_call
from flashtile.backend.gpu import cost
from flashtile.backend.hopper import support
from flashtile.backend.hopper.backward_config import FusedBackwardConfig
from flashtile.backend.hopper.launch import float32
from flashtile.backend.hopper.launch.bias_tiles import forward_tiles
from flashtile.backend.hopper.plan import candidates, listed
from flashtile.backend.hopper.plan.tables import FORWARD
from flashtile.backend.triton import support as triton
from flashtile.call.call import Features, Needs
from flashtile.call.device import Device
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import Window
from flashtile.dispatch import planner
from flashtile.errors import BackendError
from flashtile.expression.formula import formula_of
from flashtile.expression.purity import MASK_MOD

H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
BACKENDS, QKV = {"hopper": support, "triton": triton}, Needs(True, True, True)
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
        ({"dtype": torch.float64}, "bfloat16, float16, float32 and float8_e4m3fn"),
        ({"dtype": torch.float32, "head_dim": 32, "head_dim_v": 32}, "above 32"),
        ({"dtype": torch.float32, "head_dim": 128, "softcap": True}, "features but windows"),
        ({"layout": "paged", "pages": Pages(20, True, True)}, "multiples of 8"),
        ({"layout": "paged", "pages": Pages(16, True, False)}, "rows apart"),
        ({"layout": "paged", "pages": Pages(16, True, True), "leftpad_k": True}, "leftpad_k"),
        (
            {"layout": "paged", "pages": Pages(16, True, True), "features": Features(sinks=True, bias=(True,) * 4)},
            "biases",
        ),
        ({"head_dim": 520, "head_dim_v": 64}, "multiples of 8 up to 512"),
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


@pytest.mark.parametrize(("layout", "batch", "seqlen", "needs", "backend"), [
    ("dense", 2, 512, None, "hopper"), ("dense", 1, 16384, QKV, "triton"), ("varlen", 4, 4096, QKV, "hopper"),
])  # fmt: skip
def test_expected_times_of_wide_heads(layout: str, batch: int, seqlen: int, needs: Needs | None, backend: str) -> None:
    """As measured: PyTorch's products are ahead in backward of dense calls alone."""
    sizes = {"batch": batch, "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": 512, "head_dim_v": 512}
    wide = problem(layout=layout, num_heads_q=4, num_heads_kv=4, **sizes)
    found = {name: x.candidates(wide, H200, needs) for name, x in BACKENDS.items()}
    assert min(found, key=lambda x: found[x][0].microseconds) == backend


def test_declines_dropout_of_wide_heads_in_backward() -> None:
    wide = problem(dropout=True, head_dim=264, head_dim_v=264)
    assert support.declines(wide, H200) is None
    assert support.declines_backward(wide, H200, Needs(True, True, True)) == (
        "its backward pass has no dropout over 256 features"
    )


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
        mock.patch.object(cost, "ranked", in_order),
    ):
        chosen = planner._plan.__wrapped__(changed, H200, "auto", needs, None)
        assert chosen.backend == "hopper"
        assert chosen.rest is not None
        assert (chosen.rest.own, chosen.rest.needs) == (Needs(True, True, True), Needs(**{name: True}))
        assert chosen.rest.plan.backend == "triton"
        assert planner._plan.__wrapped__(changed, H200, "auto", Needs(**{name: True}), None).backend == "triton"
        with pytest.raises(BackendError, match=r"no gradient of"):
            planner._plan.__wrapped__(changed, H200, "hopper", needs, None)


@pytest.mark.parametrize("version", [(3, 6), (3, 7), (3, 8), (3, 9)])
def test_auto_takes_every_known_version_of_triton(version: tuple[int, int]) -> None:
    known = mock.patch.multiple(support, triton_version=lambda: version, unusable=lambda: None)
    with known, mock.patch.object(cost, "ranked", in_order):
        assert support.unsupported() is None
        for seqlen in (SHORT, LONG):  # two and three warpgroups
            known = problem(seqlen_q=seqlen, seqlen_k=seqlen)
            assert support.unknown_kernels(known, H200, None) is None
        assert planner._plan.__wrapped__(problem(), H200, "auto", None, None).backend == "hopper"


def test_old_versions_of_triton_are_refused() -> None:
    with mock.patch.object(support, "triton_version", return_value=(3, 5)):
        assert "need Triton 3.6 or newer; this is 3.5" in str(support.unsupported())


def test_accepts_hopper_only() -> None:
    assert support.declines(problem(), H200) is None
    assert "not for sm_100" in str(support.declines(problem(), H200._replace(arch="sm_100")))


def warpgroups_of(version: tuple[int, int] = candidates.NEWEST_3WG, **changes: object) -> set[int]:
    """Numbers of warpgroups of all candidates."""
    with mock.patch.object(candidates, "compiler_version", return_value=version):
        found = support.candidates(problem(**changes), H200, None)
    return {x.tile.forward.num_warpgroups for x in found}


def test_three_warpgroups_and_one_have_registers_for_few_features() -> None:
    """For factors and padding; other functions need more registers or waste more rows, and few pairs have no bits."""
    long = {"seqlen_q": LONG, "seqlen_k": LONG}
    assert warpgroups_of(**long) == warpgroups_of(score_mod=SCALED, **long) == {1, 2, 3}
    assert 3 in warpgroups_of(mask_mod=PADDED, **long)
    others = ({"score_mod": ADDED}, {"mask_mod": SHOWN}, {"mask_mod": OF_HEADS}, {"softcap": True})
    for functions in (*others, {"score_mod": SCALED, "mask_mod": PADDED}, {"mask_mod": PADDED, "seqlen_q": 1}):
        assert warpgroups_of(**long | functions) == {2}
    for features in ({"dropout": True}, {"features": Features(bias=(True, False, False, False))}):
        assert warpgroups_of(**features) == {1, 2}


def test_kernels_that_a_compiler_spills_are_no_candidates() -> None:
    for width, spills in ((64, False), (80, True), (96, True)):
        wide = {"head_dim": width, "head_dim_v": width}
        assert 3 in warpgroups_of((3, 7), **wide)
        assert (3 in warpgroups_of((3, 8), **wide)) != spills
    for version, late in (((3, 6), True), ((3, 7), False)):
        with mock.patch.object(candidates, "compiler_version", return_value=version):
            found = backward_configs(head_dim=128, head_dim_v=128)
        assert any(x.late_dq is not None for x in found) == late


def backward_configs(**changes: object) -> list[FusedBackwardConfig]:
    found = support.candidates(problem(**changes), H200, Needs(True, True, True))
    return [x.tile.backward for x in found]


def test_padding_without_bits_takes_two_warpgroups() -> None:
    """A plan of several lengths expects bits of some calls that are too small for them, or whose keys are split."""
    q, mask = torch.empty(3, 2, 300, 64, dtype=torch.bfloat16), torch.ones(3, 1, 1, 300, dtype=torch.bool)
    call = described_call(q, q, q, None, None, {"mask": mask})
    two, three, *_ = FORWARD[64, 64]
    assert forward_tiles(call, three)[0] == two
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
        config = forward_tiles(described_call(q, q, q, None, None, {"bias": given}), tiles_of(1)[64, 64])[0]
        return config.num_warpgroups, config.programs_per_core

    assert programs(1, 136) == (1, 3)  # in tiles
    assert programs(1, 131) == programs(44, 131) == (1, 2)
    assert programs(45, 131) == (2, 1)  # too many tiles for two programs of each core
    assert programs(1, 131, torch.empty(1, 2, 131, 131, device="meta")) == (2, 1)


def test_heads_at_once_are_at_most_those_of_the_call() -> None:
    """Times a head's blocks of keys they have to fit 32 bits, and of few rows the L2 cache holds thousands."""
    q, k = (torch.empty(1, 2, n, 64, dtype=torch.bfloat16) for n in (1, 300))
    call = described_call(q, k, k, None, None, {"mask": MaskMod(lambda b, h, i, j: 2 * i >= j)})
    with mock.patch.object(listed, "LEAST_PAIRS", 0):
        launches = hopper_launches_of(call, backward=first(heads_at_once=10**4))
    backward = next(x for x in launches if x.name == "backward")
    assert backward.arguments["lists"] is not None
    assert backward.arguments["l2_swizzle"] == 2


def test_long_rows_are_visited_in_chunks() -> None:
    """Without a mask, by programs that keep in step."""

    def chunks(seqlen_q: int, **changes: object) -> set[int]:
        given = {"window": Window(), "seqlen_q": seqlen_q, "seqlen_k": 8192, "deterministic": True} | changes
        return {x.row_chunks for x in backward_configs(**given)}

    assert [chunks(n) for n in (2**15, 2**16, 2**16 + 1, 2**17, 2**20)] == [{1}, {1}, {2}, {2}, {16}]
    assert chunks(2**17, window=Window(right=0)) == chunks(2**17, mask_mod=SHOWN) == {1}
    assert chunks(2**17, deterministic=False) == {1, 2}


@pytest.mark.parametrize(("allowed", "parts"), [(False, 3), (True, 2)])
def test_parts_of_float32(allowed: bool, parts: int) -> None:
    with mock.patch.object(float32, "allows_tf32", return_value=allowed):
        launches = hopper_launches_of(call_of_family("float32 causal 128", 128, SHORT))
    configs = [x.arguments["CONFIG"] for x in launches if "CONFIG" in x.arguments]
    assert [x.head_dim.parts for x in configs] == [parts] * 5  # two launches split rows
    assert {x.arguments["q_desc"].block_shape[-1] for x in launches if "q_desc" in x.arguments} == {128}
