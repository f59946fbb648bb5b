"""Compile shipped kernels for other GPUs, one launch for each architecture; `python -m offline --full` compiles all."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from exhausted import runs_out_of_memory
from forced import first
from offline.compiled import KIB, compile_launch, unset_registers
from offline.families import ARCHITECTURES, call_of_family, latent_call, most_registers
from offline.launches import launches_of, recorded, replay_of, results_of

import flashtile
from flashtile.api.explain import described_call
from flashtile.backend.gpu.chips import SHARED_MEMORY
from flashtile.backend.gpu.installed import triton_version
from flashtile.backend.gpu.pairs import has_pairs
from flashtile.backend.triton import entry
from flashtile.backend.triton.constants import MAX_HEAD_DIM
from flashtile.backend.triton.plan import few_rows
from flashtile.backend.triton.tile_config import KernelConfig, TileConfig
from flashtile.call.call import DIFFERENTIABLE, Call, Tangents
from flashtile.call.device import Device
from flashtile.call.plan import Plan
from flashtile.call.problem import Problem
from flashtile.dispatch.operators import OPERATORS
from flashtile.testing.generate import random_case
from flashtile.testing.score_functions import distance_table

CHOSEN = {  # family and kernel for each
    "sm_80": ("hdim 33/5", "dkdv"),
    "sm_86": ("one query", "forward"),
    "sm_89": ("bias", "forward"),
    "sm_90": ("hdim 128", "forward"),
    "sm_100": ("hdim 40/1, twenty queries", "forward"),
    "sm_103": ("mask", "forward"),
    "sm_120": ("slopes", "dq"),
    "gfx942": ("hdim 64 causal", "forward"),
    "gfx950": ("packed", "dq"),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_within_the_chip(arch: str) -> None:
    family, kernel = CHOSEN[arch]
    (launch,) = [x for x in launches_of(call_of_family(family), arch) if x.name == kernel]
    found = compile_launch(launch, arch)
    assert 0 < found.shared <= SHARED_MEMORY[arch] * KIB
    assert 0 < found.registers <= most_registers(arch)
    assert not found.unset


def test_families_without_a_backward_pass_have_launches_of_forward() -> None:
    names = [x.name for x in launches_of(call_of_family("latent rows, 16 heads"), "sm_120")]
    assert "forward" in names
    assert not {"dq", "dkdv", "fused"} & {*names}


def test_tangents_of_a_score_mod_compile() -> None:
    """With a tensor that it captures; the interpreter does not know the compiler's types."""
    q, table = torch.empty(1, 2, 300, 32, dtype=torch.bfloat16), torch.ones(64)
    score_mod = flashtile.ScoreMod(lambda s, b, h, i, j, x: s + x[(i - j) % 64], (table,))
    call = described_call(q, q, q, None, None, {"score_mod": score_mod, "causal": True})
    tile = KernelConfig(32, 32, 4, 2)
    plan = Plan("triton", TileConfig(tile, tile, tile, tangents=tile), 1, ())
    with recorded() as launched:
        entry.tangents(plan, call, Tangents(q=q, v=q, score_mod_tensors=(table,)))
    found = compile_launch(launched[-1], "sm_90")
    assert found.name == "tangents"
    assert found.spilled == 0
    assert not found.unset


def test_the_long_loop_stays_asynchronous_on_hopper() -> None:
    """ptxas warns when it serializes matrix products because it cannot keep their operands apart."""
    (launch,) = [x for x in launches_of(call_of_family("hdim 64 causal"), "sm_90") if x.name == "forward"]
    found = compile_launch(launch, "sm_90")
    assert not found.serialized
    assert found.spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
def test_tiles_of_latent_rows(arch: str, dtype: torch.dtype) -> None:
    """Every tile fits its chip, and its loop spills nothing: a few bytes are saved ahead of it."""
    for heads in (16, 32, 128):
        call = latent_call(heads, dtype)
        for tile in few_rows.latent_tiles(Problem.describe(call), Device("cuda", arch, arch, 100)):
            chosen = first(num_splits=4, forward=tile, given_splits=None)
            (launch,) = launches_of(call, arch, chosen, backward=None)
            found = compile_launch(launch, arch)
            assert found.shared <= SHARED_MEMORY[arch] * KIB, tile
            assert found.spilled <= 16, tile
            assert not found.serialized
            assert not found.unset


@pytest.mark.parametrize("kernel", ["forward", "dkdv"])  # dq reads a table as forward does
def test_a_table_of_a_score_mod_stays_out_of_shared_memory(kernel: str) -> None:
    """Copies of its elements ahead of time would take a tile of memory, and spill."""
    q = torch.empty(1, 2, 512, 64, dtype=torch.bfloat16)
    mod = flashtile.ScoreMod(distance_table, (torch.empty(2, 17),))
    launches = launches_of(described_call(q, q, q, None, None, {"score_mod": mod}), "sm_90")
    found = compile_launch(next(x for x in launches if x.name == kernel), "sm_90")
    assert found.shared <= 80 * KIB
    assert found.spilled == 0
    assert not found.unset


@pytest.mark.skipif(triton_version() != (3, 6), reason="newer ptxas takes 158 to 167 registers: three")
@pytest.mark.parametrize("arguments", [{}, {"causal": True}, {"causal": True, "softcap": 30.0}])
def test_four_programs_of_head_dim_64_share_a_hopper_core(arguments: dict[str, Any]) -> None:
    q = torch.empty(8, 16, 1024, 64, dtype=torch.bfloat16)
    (launch,) = launches_of(described_call(q, q, q, None, None, arguments), "sm_90", backward=None)
    found = compile_launch(launch, "sm_90")
    assert found.registers is not None
    assert found.registers * launch.arguments["num_warps"] * 32 * 4 <= 65536
    assert (found.shared + KIB) * 4 <= 228 * KIB
    assert found.spilled == 0


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_results_lie_in_memory_as_a_compiler_expects(name: str, backend: str) -> None:
    """Also if a kernel reads a copy of its input with another memory layout."""
    strided = torch.empty(2, 128, 4, 128, dtype=torch.bfloat16).transpose(1, 2)[..., ::2]
    inputs = dict.fromkeys("qkv", torch.empty(2, 4, 128, 64, dtype=torch.bfloat16)) | {name: strided}
    call, operators = described_call(**inputs, cu_q=None, cu_k=None, keywords={}), OPERATORS["dense"]
    with recorded():
        out, lse, *gradients = results_of(call, backend, "sm_90")
    assert out is not None
    assert lse is not None
    found = (out, lse, *gradients[:3])
    needs = [name in ("q", "k", "v") for name in DIFFERENTIABLE]
    forward = operators.fake_forward(*operators.arguments(call))
    backward = operators.fake_backward(needs, out, lse, None, None, *operators.arguments(call))
    for x, y in zip(found, (*forward, *backward[:3]), strict=True):
        assert x is not None
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_memory_that_runs_out_in_a_pass(backend: str, again: bool) -> None:
    """While it runs for the first time, and in a replay: the next call launches all of its kernels."""
    q = torch.empty(2, 128, 4, 128, dtype=torch.bfloat16).transpose(1, 2)[..., ::2]  # features are copied
    call = described_call(q, q, q, None, None, {"sinks": torch.zeros(4)})

    with recorded():
        run = replay_of(call, backend, "sm_90") if again else partial(results_of, call, backend, "sm_90")

    def launches() -> list[tuple[str, dict[str, Any]]]:
        with recorded() as found:
            results = run()
        assert all(x is not None for x in (*results[:5], results[-1]))
        return [(x.name, {name: y for name, y in x.arguments.items() if isinstance(y, int | float)}) for x in found]

    def check() -> None:
        assert launches() == expected

    expected = launches()
    assert runs_out_of_memory(launches, check) > 8


def test_variations_share_backward_kernels() -> None:
    """Forward has most: the split of a row's keys depends on lengths. Rows of a bias or mask are aligned or not."""
    forward: list[int] = []
    for seed in range(1_000_000, 1_000_012):
        calls = [call_of_seed(seed, n) for n in range(5)]
        kernels = [compiled_by(call) for call in calls]
        assert len({backward for _, backward in kernels}) <= 1 + has_pairs(calls[0].tensors), seed
        forward.append(len({forward for forward, _ in kernels}))
    assert sum(forward) < 2.5 * len(forward)


def call_of_seed(seed: int, variation: int) -> Call:
    case = random_case(seed, function="attention", dtypes=(torch.bfloat16,), variation=variation)
    given = {name: x for name, x in case.arguments.items() if name != "score_mod"}
    q, k, v = (given.pop(name) for name in "qkv")
    return described_call(q, k, v, None, None, given)


def compiled_by(call: Call) -> tuple[frozenset[Any], frozenset[Any]]:
    """Specializations that Triton compiles forward and backward kernels for."""
    if max(call.tensors.q.shape[-1], call.tensors.v.shape[-1]) > MAX_HEAD_DIM:
        return frozenset(), frozenset()
    found = [(x.name, x.compiled_by) for x in launches_of(call, "sm_90")]
    forward = {x for x in found if x[0] == "forward"}
    return frozenset(forward), frozenset(found) - forward


MATMUL, EVERYWHERE = torch.backends.cuda.matmul, torch.backends


@pytest.fixture
def precision_restored() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = "none"


@pytest.mark.usefixtures("precision_restored")
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "ieee"),
        ([(MATMUL, "allow_tf32", True)], "tf32"),
        ([(MATMUL, "fp32_precision", "tf32")], "tf32"),
        ([(EVERYWHERE, "fp32_precision", "tf32")], "tf32"),
        ([(EVERYWHERE, "fp32_precision", "tf32"), (MATMUL, "fp32_precision", "ieee")], "ieee"),
        ([(MATMUL, "allow_tf32", True), (MATMUL, "fp32_precision", "ieee")], "ieee"),
        ([(MATMUL, "fp32_precision", "tf32"), (MATMUL, "allow_tf32", False)], "ieee"),
    ],
)
def test_precision_of_fp32_products(settings: list[tuple[Any, str, Any]], expected: str) -> None:
    """Set through either of PyTorch's APIs, or both. On Hopper, float32 products are three of TF32, or in backward six
    of bfloat16.
    """

    def splits(tile: TileConfig) -> bool:
        return tile.dkdv.precision == "bf16x6"

    for owner, name, value in settings:
        setattr(owner, name, value)
    for arch, backward, exact in (
        ("sm_80", first(), {"ieee"}),
        ("sm_90", first(), {"tf32x3"}),
        ("sm_90", first(where=splits), {"tf32x3", "bf16x6"}),
    ):
        q = torch.empty(1, 2, 128, 16)
        launches = launches_of(described_call(q, q, q, None, None, {}), arch, backward=backward)
        found = {x.arguments["CONFIG"].PRECISION for x in launches if "CONFIG" in x.arguments}
        assert found == (exact if expected == "ieee" else {expected})


def test_a_register_that_nothing_has_written_is_found() -> None:
    good = "/*0010*/ ULDC.64 UR4, c[0x0][0x208] ;\n/*0020*/ LDG.E R2, desc[UR4][R2.64] ;"
    bad = "/*0030*/ UIADD3 UR26, UP0, UR26, 0x20, URZ ;"
    assert unset_registers(good) == ()
    assert len(unset_registers(good + "\n" + bad)) == 1
    assert len(unset_registers("/*0010*/ HGMMA.64x16x16.F32 R56, R28, gdesc[UR24].tnspB, R56 ;")) == 1
