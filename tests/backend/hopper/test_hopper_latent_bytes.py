"""The Hopper kernel of latent rows of 8 bits without a GPU: results on the emulation, mistakes noticed, and SASS."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dataclasses import replace

from eight_bit_rows import in_eight_bits, small_weights
from forced import first, forced
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated
from gluon_emulation.machine import EmulationError
from offline.compiled import compile_launch
from offline.families import latent_call
from offline.launches import hopper_launches_of
from test_hopper_latent import H200, H200_MEASURED, latent_case

import flashtile
from flashtile.backend.hopper import support
from flashtile.backend.triton.launch.cache import attention_after
from flashtile.call.cache import CacheCall
from flashtile.call.call import Call
from flashtile.call.eight_bit import PACKED, EightBit
from flashtile.call.problem import Problem
from flashtile.dispatch import passes
from flashtile.dispatch.planner import candidates_of
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = torch.float16
CASES = {
    "a row": (in_eight_bits(latent_case(16, 1, (384, 0)), "e4m3"), 1),
    "split keys": (in_eight_bits(latent_case(40, 1, (384,)), "e4m3"), 2),
    "more splits than keys": (in_eight_bits(latent_case(8, 2, (130, 3)), "e5m2"), 4),
    "two queries": (in_eight_bits(latent_case(16, 2, (200, 1), window=(None, 3), causal=False), "int8"), 1),
    "scores far apart": (in_eight_bits(latent_case(12, 1, (257,), spread=8), "e4m3"), 1),
    "dense cache": (in_eight_bits(latent_case(20, 3, (70, 200), page_size=None, dtype=HALF), "e4m3"), 1),
    "scales by key": (in_eight_bits(latent_case(16, 1, (150, 64), page_size=192), "e4m3 by key"), 1),
    "656 bytes": (in_eight_bits(latent_case(16, 1, (129, 1)), "656 bytes"), 1),
    "656 bytes, more rows": (in_eight_bits(latent_case(40, 1, (100,), dtype=HALF, scale=-0.1), "656 bytes"), 2),
}


def wrong(case: Case, splits: int, seed: int = 0, folder: Path = FOLDER) -> list[str]:
    with forced(support, first(num_splits=splits)), emulated(3, seed, folder) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert launched == ["latent_bytes_kernel", "merge_kernel"][: 1 if splits == 1 else 2]
    return [str(x) for x in compare(results, case, rounds_to_eight_bits=True) if not x.ok]


@pytest.mark.parametrize("name", CASES)
def test_decoding(name: str) -> None:
    assert wrong(*CASES[name]) == []


def test_scales_behind_an_append(monkeypatch: pytest.MonkeyPatch) -> None:
    """The append that runs in front on a GPU passes them on."""

    def append(call: CacheCall) -> Call:
        return attention_after(call, (call.tensors.q, call.cache.cache_seqlens))

    monkeypatch.setattr(passes, "append_and_rotate", append)
    assert wrong(*CASES["scales by key"]) == []


def test_weights_outside_of_float16() -> None:
    """What they lose is what the contract says, and more than it allows other kernels."""
    case = small_weights()
    with emulated(1):
        results = case.run("hopper")
    expected = solve(case)
    assert 0.6 < compare(results, case, expected, rounds_to_eight_bits=True)[0].ratio < 0.8
    assert compare(results, case, expected)[0].ratio > 10


def test_queries_outside_of_float16() -> None:
    """Each row has its own factor; infinities and NaN reach their rows alone."""
    q = torch.ones(1, 4, 1, 576, dtype=torch.bfloat16)
    q[0, 0] *= 1e30
    q[0, 1] *= 1e-30
    q[0, 2, 0, 3], q[0, 3, 0, 4] = torch.inf, torch.nan
    k = torch.randint(-100, 100, (1, 64, 1, 576), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    given: dict[str, Any] = {"v_dim": 512, "cache_seqlens": torch.tensor([50]).int(), "scale": 1e-32}
    given["page_table"] = torch.zeros(1, 1, dtype=torch.int32)
    with emulated(1):
        out, lse = flashtile.attention_with_kvcache(q, k, None, backend="hopper", return_lse=True, **given)
    expected, expected_lse = flashtile.attention_with_kvcache(q, k, None, backend="tiled", return_lse=True, **given)
    torch.testing.assert_close(out, expected, equal_nan=True, rtol=0.02, atol=0.3)
    torch.testing.assert_close(lse[:, :2], expected_lse[:, :2])


ADDED = "        acc = add_values(ring, context.p[W], rescale(acc, alpha), scales, stage, 0, CONFIG)\n"
RELEASED = "        consumer_release(empty_barriers(CONFIG), count, STAGES)\n"
NUMBERS = "numbers(smem.load(LAYOUT), scales, c, KEY_SCALES, dtype)"
BUGS = (
    ("release too early", "forward.py", ADDED + RELEASED, RELEASED + ADDED),
    ("another stage", "forward.py", "consumer_wait(ring, count, STAGES)", "consumer_wait(ring, count + 1, STAGES)"),
    ("sums before they are there", "forward.py", "            mbarrier.wait(sums.there.index(0), 0)\n", ""),
    ("sums over loaded keys", "forward.py", "        mbarrier.wait(sums.read.index(0), 0)\n", ""),
    ("l without a factor", "paired.py", "l = rescaled(l, alpha)", "l = l"),
    ("row_max unseen", "paired.py", "stats.index(W).store(own)\n        meet(CONFIG)", "stats.index(W).store(own)"),
    ("no fence", "blocks.py", "place.dtype))\n    fence_async_shared()", "place.dtype))"),
    ("load too early", "memory.py", "producer_acquire(empty_barriers(CONFIG), n - tile.lo, STAGES)", "STAGES + 0"),
    ("features in order", "operands.py", f"in_words({NUMBERS})", NUMBERS),
    ("scales of other columns", "operands.py", "scales[0].slice(c, 1, dim=1)", "scales[0].slice(3 - c, 1, dim=1)"),
)


@pytest.mark.bugs
@pytest.mark.parametrize("bug", BUGS, ids=[name for name, *_ in BUGS])
def test_mistakes_are_noticed(bug: tuple[str, str, str, str], tmp_path: Path) -> None:
    """Within some orders of events."""
    name, file, old, new = bug
    folder = tmp_path / f"latent_bytes_bug{BUGS.index(bug)}"
    copy_with_mistake(folder, f"kernels/latent_bytes/{file}", name, old, new)
    cases = {"forward.py": ["a row"], "paired.py": ["split keys"]}.get(file, ["656 bytes, more rows", "split keys"])
    for seed in range(8):
        case = cases[seed % len(cases)]
        try:
            if wrong(*CASES[case], seed, folder):
                return
        except EmulationError:
            return
    pytest.fail("not detected")


@pytest.mark.parametrize(("heads", "dtype", "splits"), [
    pytest.param(16, torch.float8_e4m3fn, 1, marks=pytest.mark.sass),
    pytest.param(16, torch.uint8, 1, marks=pytest.mark.sass),
    pytest.param(32, torch.int8, 2, marks=pytest.mark.sass),
    pytest.param(128, torch.float8_e4m3fn, 1, marks=pytest.mark.sass),
    pytest.param(128, torch.uint8, 1, marks=pytest.mark.sass),
])  # fmt: skip
def test_compiles_for_hopper(heads: int, dtype: torch.dtype, splits: int) -> None:
    launch = hopper_launches_of(latent_call(heads, dtype), first(num_splits=splits))[0]
    kernel = compile_launch(launch, "sm_90")
    assert (kernel.name, kernel.serialized, kernel.unset) == ("latent_bytes", False, ())
    assert kernel.shared <= 227 * 1024
    assert kernel.spilled <= (256 if heads > 32 else 64)


def problem(**changes: Any) -> Problem:
    return problem_of(torch.float8_e4m3fn, **changes)


def problem_of(of_cache: torch.dtype, **changes: Any) -> Problem:
    return replace(Problem.describe(latent_call(128, of_cache)), **changes)


@pytest.mark.parametrize(("changes", "reason"), [
    ({}, None),
    ({"eight_bit": PACKED, "dtype": HALF}, None),
    ({"eight_bit": EightBit("e4m3", True, True)}, None),
    ({"eight_bit": EightBit("e4m3", True, True), "dtype": HALF}, "queries in bfloat16"),
    ({"head_dim": 512}, "not of 8 bits"),
    ({"latent": False}, "not of 8 bits"),
])  # fmt: skip
def test_declines(changes: dict[str, Any], reason: str | None) -> None:
    found = support.declines(problem(**changes), H200)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(("heads", "rows"), [(16, 16), (17, 32), (33, 64), (128, 64)])
def test_tiles_of_rows(heads: int, rows: int) -> None:
    found = support.candidates(problem(num_heads_q=heads, fine=None), H200, None)[0].tile.forward
    assert found.block_m == rows
    assert "latent rows of 8 bits" in str(found)


# Microseconds by Hopper and Triton (docs/journal/2026-11-29-latent-rows-of-8-bits-on-hopper.md).
@pytest.mark.parametrize(("shape", "dtype", "times"), [
    ((128, 16, 1, 4096), torch.float8_e4m3fn, (86.5, 187.3)),
    ((128, 16, 1, 4096), torch.int8, (101.7, 189.5)),
    ((128, 16, 1, 4096), torch.uint8, (152.4, 209.9)),
    ((128, 16, 1, 8192), torch.float8_e4m3fn, (159.5, 361.6)),
    ((128, 128, 1, 4096), torch.float8_e4m3fn, (406.2, 1544.5)),
    ((128, 128, 1, 4096), torch.int8, (437.3, 1606.3)),
    ((128, 128, 1, 4096), torch.uint8, (487.7, 1625.5)),
])  # fmt: skip
def test_expected_times(shape: tuple[int, ...], dtype: torch.dtype, times: tuple[float, float]) -> None:
    """Each backend's expected time is near the measured one, for batch, heads, queries and keys."""
    sizes = dict(zip(("batch", "num_heads_q", "seqlen_q", "seqlen_k"), shape, strict=True))
    decoding = problem_of(dtype, **sizes, fine=None)
    for backend, time in zip(("hopper", "triton"), times, strict=True):
        expected = min(way.microseconds for way in candidates_of(backend, decoding, H200_MEASURED, None, None))
        assert 0.9 < expected / time < 1.1
