"""The Hopper backend without a GPU: what it supports, and the SASS of its kernels.

`pytest -m sass` compiles all kernels and examines the order of their instructions; by default, one problem for each
kernel is compiled.
"""

import functools
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from forced import first, in_order
from hopper_variants import BIAS_TILES, FEW, FLOAT32, LONG, SHORT, VARIANTS, call_of_family, tiles_of
from offline.compiled import Compiled, compile_launch
from offline.launches import Launch, hopper_launches_of

from flashtile import MaskMod
from flashtile.api.explain import described_call
from flashtile.backend.gpu import cost
from flashtile.backend.hopper import support
from flashtile.backend.hopper.launch import float32
from flashtile.backend.hopper.launch.bias_tiles import forward_tiles
from flashtile.backend.hopper.plan import candidates, listed
from flashtile.backend.hopper.plan.tables import FORWARD
from flashtile.backend.hopper.tile_config import FusedBackwardConfig
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
SHARED_MEMORY = 227 * 1024
CHOSEN = (  # and the number of warpgroups
    ("full", 64, LONG, 3), ("causal", 64, LONG, 3), ("sinks", 128, SHORT, 2), ("packed everything 64", 64, SHORT, 2),
    ("causal", 96, SHORT, 2), ("causal", 96, LONG, 3), ("packed 256", 256, SHORT, 2),
    ("causal", 80, SHORT, 2), ("full", 80, LONG, 3), ("causal", 160, SHORT, 2), ("full", 64, FEW, 1),
    ("full", 128, FEW, 2), (BIAS_TILES, 32, SHORT, 1), ("packed 64", 64, SHORT, 1),
)  # fmt: skip
BACKWARD = (("packed 64", 64, SHORT), ("causal", 80, SHORT), ("packed 96", 96, SHORT), ("packed 128", 128, SHORT))
LATE_DQ = (("full", 64, 512), ("full", 96, 8192), ("causal", 64, 2048), ("causal", 80, 2048), ("causal", 96, 2048))
SPLIT_BACKWARD = (
    ("causal", (192, 128), SHORT), ("causal", 160, SHORT), ("full", 192, SHORT), ("packed 256", 256, SHORT),
)  # fmt: skip
IN_REGISTERS = [("full", 192, SHORT)] if (support.triton_version() or (0, 0)) <= candidates.NEWEST_LATE_DQ else []
BACKWARD_SPILL, FORWARD_SPILL = 150, 4  # most bytes of a thread
# Outside of inner loops, where `test_overlap_of_forward` accepts none.
MORE_FORWARD_SPILL = {
    ("packed everything 64", 64, SHORT, 2): 8, ("causal", 96, LONG, 3): 16, ("packed 256", 256, SHORT, 2): 8,
    ("causal", 160, SHORT, 2): 16,
}  # fmt: skip
SPLIT_BACKWARD_SPILL = {("causal", 160, SHORT): 4}  # others: 0
# Measured, with Triton 3.6 and with 3.9: mostly numbers of the tile (docs/design/hopper-float32.md).
FLOAT32_SPILL = {"float32_forward": (320, 850), "dq": (64, 200), "dkdv": (32, 500)}
FORWARD_KERNELS = ("forward", "wide_forward")
WIDE_SPILL = 480  # of addresses, a few of which a step loads
WIDE_DQ_SPILL = 760  # of addresses too, some 25 of which a step loads
NEWER_TRITON_SPILL = 32  # most bytes of a thread in forward
NEWER_TRITON_SPLIT_SPILL, NEWER_TRITON_LOADS = 16, 1  # in dq and dkdv; of spilled numbers in a step of forward
SPILLS_3WG = (support.triton_version() or (0, 0)) > candidates.NEWEST_3WG  # above 64 features: two instead
ONE_OF_EACH = (  # problem, kernel, most spilled bytes of a thread
    (("full", 64, SHORT, 1), "forward", NEWER_TRITON_SPILL), (("full", 64, SHORT), "backward", BACKWARD_SPILL),
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


def launch_of(family: tuple, name: str) -> Launch:
    """A launch of a family's call: by two warpgroups, or their number in the family; by kernels of more registers."""

    warpgroups = family[3] if family[3:] else 2
    if warpgroups == 3 and family[1] > 64 and SPILLS_3WG:
        warpgroups = 2

    def fits(config: Any) -> bool:
        if name in FORWARD_KERNELS:
            return config.num_warpgroups == warpgroups
        if config.kind == "split":
            return config.dkdv.keys_in_registers == (family in IN_REGISTERS)
        return (config.late_dq is not None) == (family in LATE_DQ)

    choice = first(where=fits)
    forward, backward = (choice, first()) if name in FORWARD_KERNELS else (first(), choice)
    launches = hopper_launches_of(call_of_family(*family[:3]), forward, backward)
    [launch] = [launch for launch in launches if launch.name == name]
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
    loops = inner_loops(kernel.code, 6, ("HGMMA", "MUFU.EX2", "STL", "LDL"))
    steps = [order for order in loops if len(waits_in(order)) >= 5]
    assert len(steps) >= 2  # one for each warpgroup
    for order in steps:
        waits = waits_in(order)
        # Waits: dout's product with v, with and without masks; dv, with dq in flight; dq; the next scores; dk.
        # dq takes two wgmmas, the other products one for each chunk.
        assert [int(order[n][-1]) for n in waits] == [0, 0, 2, 2 * chunks, chunks, 0]
        products = [n for n, word in enumerate(order) if word == "HGMMA"]
        for begin, end in ((-1, waits[0]), (waits[1], waits[2]), (waits[2], waits[3])):
            assert any(begin < n < end for n in products)
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
    offsets = re.findall(r"REDG\.E\.ADD\.F32x4\S* desc\[\w+\]\[R\d+\.64(?:\+0x(\w+))?\]", kernel.code)
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
    for sass, waits in ((dq.code, [values, 0, 0]), (dkdv.code, [values, 0] if early else [0, 0])):
        steps = inner_loops(sass, most_waits=3)
        assert len(steps) >= len(waits) - 1  # dq: one for each warpgroup; dkdv: only dv's
        for order in steps:
            at = [n for n, word in enumerate(order) if "DEPBAR" in word]
            assert [int(order[n][-1]) for n in at] == waits
            exponentials = [n for n, word in enumerate(order) if word == "MUFU.EX2"]
            first, last = (-1, at[0]) if early and sass is dkdv.code else at[:2]
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
    loops = inner_loops(compiled(family, "forward").code, first=("HGMMA", "LDL"))
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


@pytest.mark.sass
@pytest.mark.parametrize("family", [("causal", 512, SHORT), ("packed everything 512/264", 512, SHORT)])
def test_wide_backward_compiles_for_hopper(family: tuple) -> None:
    """dq, dk and dv. Each of dq's warpgroups multiplies for all scores, and those of dk and dv for its own."""
    launches = [x for x in hopper_launches_of(call_of_family(*family)) if "dq" in x.name or "dkdv" in x.name]
    kernels = [compile_launch(x, "sm_90") for x in launches]
    for kernel, spill, products in zip(kernels, (WIDE_DQ_SPILL, 16, 16), (136, 68, 40), strict=True):
        assert kernel.shared <= SHARED_MEMORY
        assert kernel.spilled <= spill
        assert not kernel.serialized
        assert not kernel.unset
        assert kernel.code.count("HGMMA") == products


@pytest.mark.sass
@pytest.mark.parametrize("name", ["full", "causal", "paged 512"])
def test_wide_forward_compiles_for_hopper(name: str) -> None:
    """The first warpgroup waits for each chunk of keys but the last with the next one's product in flight, for its
    scores with the products of its two chunks of values, and for these; the second one and the end for products alone.
    """
    family = name, 512, SHORT
    kernel = compiled((*family, 1), "wide_forward")
    assert kernel.shared <= SHARED_MEMORY
    assert kernel.spilled <= WIDE_SPILL
    assert not kernel.serialized
    assert not kernel.unset
    waits = "".join(re.findall(r"DEPBAR\.LE gsb0, 0x(\d)", kernel.code))
    assert waits.replace("11120", "", 1) == "00"
    assert kernel.code.count("HGMMA") == 4 * 8 + 3 * 2 * 4  # scores; p and values in two places and in the other half


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
