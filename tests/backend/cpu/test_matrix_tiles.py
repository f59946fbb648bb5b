"""Forward of bfloat16 by matrix tiles: AMX's where the processor has them, and emulated ones everywhere."""

import importlib
import itertools
import math
import random
from typing import Any

import pytest
import torch
from checking import assert_right, dense_case, offsets

import flashtile
from flashtile.testing.case import Case
from flashtile.testing.inputs import KINDS
from flashtile.testing.layouts import LAYOUTS, lay_out

forward, jit, peak, support, targets, tile_forward, variants = (
    importlib.import_module(f"flashtile.backend.cpu.{name}")
    for name in ("kernels.forward", "jit", "peak", "support", "targets", "kernels.tile_forward", "variant")
)
WIDTHS = [x for x in ("amx", "amx-emulated") if x in targets.usable_widths()]
BFLOAT16 = torch.bfloat16


@pytest.fixture(params=WIDTHS, autouse=True)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(targets.VECTORS_VARIABLE, request.param)
    return str(request.param)


def right(**keywords: Any) -> None:
    assert_right(dense_case(dtype=BFLOAT16, forward_only=True, **keywords), "cpu")


def test_inputs_of_every_kind() -> None:
    for kind, seed in itertools.product(KINDS, range(6)):
        right(seqlen_q=70, seqlen_k=101, head_dim=33, kind=kind, seed=seed, causal=True)


def test_tails() -> None:
    """Rows of one, two and four vectors; keys and features that fill no tile; windows that begin inside of one."""
    for n in (9, 16, 17, 31, 32, 33, 47, 64, 65):
        right(batch=1, num_heads_q=4, num_heads_kv=2, seqlen_q=n, seqlen_k=97 + n, head_dim=n, head_dim_v=80 - n)
        right(batch=1, seqlen_q=200 - n, seqlen_k=300, head_dim=64, window=(n, n // 3))
    right(batch=1, seqlen_q=300, seqlen_k=2100, head_dim=128)  # with totals


def test_probabilities_of_one_rounding() -> None:
    """Equal probabilities, whose roundings have one sign: the maximum is another key's."""
    for score in (-0.3, -1.7, -5.2):
        q, k = torch.ones(1, 1, 20, 32), torch.full((1, 1, 3000, 32), score / 32)
        k[:, :, 7] = 0
        v = torch.ones(1, 1, 3000, 32) + torch.arange(32) / 32
        q, k, v = (x.to(BFLOAT16) for x in (q, k, v))
        assert_right(Case("attention", {"q": q, "k": k, "v": v, "scale": 1.0}, forward_only=True), "cpu")


def test_layouts() -> None:
    for name, layout in itertools.product("qkv", LAYOUTS):
        case = dense_case(dtype=BFLOAT16, seqlen_q=40, seqlen_k=70, head_dim=32, forward_only=True)
        case.arguments[name] = lay_out(case.arguments[name], layout, random.Random(layout))
        assert_right(case, "cpu")
    pages = {"k": torch.randn(5, 40, 2, 32), "v": torch.randn(5, 40, 2, 32), "q": torch.randn(70, 4, 32)}
    given = {name: x.to(BFLOAT16) for name, x in pages.items()}
    given |= {"cu_seqlens_q": offsets(30, 40), "cu_seqlens_k": None, "causal": True}
    given |= {"page_table": torch.tensor([[0, 3, 1], [3, 4, 0]], dtype=torch.int32)}
    given |= {"seqused_k": torch.tensor([111, 77], dtype=torch.int32)}
    assert_right(Case("attention_varlen", given, forward_only=True), "cpu")


def test_features() -> None:
    """All features in one call, whose blocks are full, partly visible and hidden."""
    given = {
        "window": (40, 30),
        "mask": torch.rand(2, 1, 150, 230) < 0.7,
        "bias": torch.randn(1, 4, 150, 230).to(BFLOAT16),
        "alibi_slopes": torch.rand(2, 4),
        "sinks": torch.tensor([1.0, -math.inf, math.inf, 0.3]),
        "softcap": 2.0,
        "dropout_p": 0.3,
        "dropout_seed": 7,
    }
    shape = {"num_heads_q": 4, "num_heads_kv": 2, "seqlen_q": 150, "seqlen_k": 230, "head_dim": 40, "head_dim_v": 24}
    right(**shape, **given)


def test_threads_leave_results_alone() -> None:
    q = torch.randn(2, 8, 300, 64).to(BFLOAT16)
    before, results = torch.get_num_threads(), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(flashtile.attention(q, q, q, causal=True, backend="cpu"))
    torch.set_num_threads(before)
    assert all(torch.equal(x, results[0]) for x in results)


def test_explain_names_the_instructions(width: str) -> None:
    q = torch.randn(1, 4, 64, 32)
    assert f"forward by {width}," in flashtile.explain(*[q.to(BFLOAT16)] * 3, backend="cpu").tile + ","
    assert "amx" not in flashtile.explain(q, q, q, backend="cpu").tile
    assert "amx" not in flashtile.explain(q[:, :, :1].to(BFLOAT16), *[q.to(BFLOAT16)] * 2, backend="cpu").tile


def test_the_instructions_of_amx() -> None:
    """Cross-compiled: shapes are configured first and released last, and nothing spills tiles between."""
    from llvmlite import binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = targets.make_target("amx")
    processor = targets.generic("amx", "x86_64-unknown-linux-gnu")
    variant = variants.Variant("bfloat16", 1, tiles=True)
    source, machine = forward.source(variant, target, tile_forward.TileKernel), jit.target_machine(processor)
    assembly = "".join(machine.emit_assembly(llvm.parse_assembly(x)) for x in source.texts().values())
    names = [line.split()[0] for line in assembly.splitlines() if line.strip()]
    used = [x for x in names if x.startswith(("ldtilecfg", "sttilecfg", "tile", "tdp")) and not x.endswith(":")]
    count = {x: used.count(x) for x in used}
    microkernels = [(m, n) for m, n in itertools.product((1, 2), repeat=2)]
    tiles, operands = sum(m * n for m, n in microkernels), sum(m + n for m, n in microkernels)
    assert "tdpbf16ps" in machine.emit_assembly(llvm.parse_assembly(peak.source_of_tiles(variant, target).text))
    assert count == {
        "ldtilecfg": 1,
        "tilerelease": 1,
        "tilezero": 2 * tiles,
        "tdpbf16ps": 2 * tiles,
        "tilestored": 2 * tiles,
        "tileloadd": 2 * operands,
    }
