"""The Hopper kernel of float8_e4m3fn without a GPU: results on the emulation, and mistakes that it notices."""

from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from eight_bit_cases import CASES, FP8, PAGED, call_of, is_close, paged_case, run, tail
from forced import first, forced
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated
from gluon_emulation.machine import EmulationError
from paged_cases import with_missing_pages

from flashtile.api import kvcache
from flashtile.backend.hopper import support
from flashtile.backend.triton.launch.cache import attention_after
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")


def is_wrong(given: dict[str, Any], seed: int = 0, folder: Path = FOLDER) -> bool:
    with emulated(3, seed, folder) as launched, poisoned_allocation():
        out, lse = run(given, "hopper")
    assert launched[0] == "eight_bit_forward_kernel"
    return not is_close(given, out, lse)


def test_pages_after_an_append_by_triton_have_their_scales() -> None:
    """On a GPU, Triton's kernel appends to the caches that Hopper's reads."""
    case = paged_case("dense cache", "cpu")
    with mock.patch(f"{kvcache.__name__}.attend_with_cache", side_effect=lambda call: [call.tensors.q] * 2) as attend:
        case.run("auto")
    call = attend.call_args.args[0]
    whole = call.attention()
    after = attention_after(call, [whole.tensors.q, whole.tensors.seqused_k])
    for name, x in whole.tensors._asdict().items():
        y = getattr(after.tensors, name)
        assert torch.equal(x, y) if name.endswith("descale") and x is not None else (x is None) == (y is None), name


@pytest.mark.parametrize("name", CASES)
def test_results(name: str) -> None:
    assert not is_wrong(CASES[name])


def test_equal_values_come_out_as_they_are() -> None:
    """Whatever p is: its sum is that of rounded numbers."""
    given = call_of(64, 64, 300, scales=0)
    given["v"] = torch.full_like(given["v"].float(), 1.25).to(FP8)
    with emulated():
        out, _ = run(given, "hopper")
    assert (out / 1.25 - 1).abs().max() < 1e-6


@pytest.mark.parametrize("place", [0, 300, 599])
def test_small_weights_of_other_blocks(place: int) -> None:
    """Each block's are rounded relative to its own largest one, whether that comes first or last."""
    assert error_of_tail(place) < 1e-5


def test_weights_relative_to_a_largest_one_before(tmp_path: Path) -> None:
    copy_with_mistake(tmp_path / "row", SOFTMAX, "downward", " setp.lt.or.f32 p, other, {LEAST}, p;", "")
    assert error_of_tail(599, tmp_path / "row") > 0.9


def error_of_tail(place: int, folder: Path = FOLDER) -> float:
    given, expected = tail(600, place, 40)
    with emulated(3, 0, folder):
        out, _ = run(given, "hopper")
    return float((out / expected - 1).abs().max())


@pytest.mark.parametrize(("name", "splits"), [("causal", 2), ("causal 256", 7), ("sinks", 2), ("narrower", 2)])
def test_split_keys(name: str, splits: int) -> None:
    """Also more splits than there are blocks of keys."""
    given = CASES[name]
    with forced(support, first(num_splits=splits)), emulated(3, 0) as launched, poisoned_allocation():
        out, lse = run(given, "hopper")
    assert launched == ["eight_bit_forward_kernel", "combine_kernel"]
    assert is_close(given, out, lse)


def test_results_of_splits_in_rows_of_odd_strides() -> None:
    given = call_of(64, 70, 300)
    out = torch.full((1, 2, 70, 68), 7.0)
    with forced(support, first(num_splits=2)), emulated(3, 0):
        found, lse = run(given | {"out": out[..., :64]}, "hopper")
    assert found.data_ptr() == out.data_ptr()
    assert (out[..., 64:] == 7).all()
    assert is_close(given, found, lse)


@pytest.mark.parametrize(("name", "splits"), [("8 keys a page", 3), ("dense cache", 2)])
def test_split_pages(name: str, splits: int) -> None:
    with forced(support, first(num_splits=splits)):
        assert wrong_of(paged_case(name, "cpu")) == []


def test_a_scale_times_scales_that_is_0() -> None:
    """Hidden scores stay -inf."""
    given = call_of(64, 40, 60, causal=True, scale=3e-43)
    assert not is_wrong(given | {"k_descale": given["k_descale"] * 1e-4})


def test_another_configuration() -> None:
    with forced(support, first(num_warpgroups=2, transpose_warps=4, speculative_exps=8)):
        assert not is_wrong(CASES["causal"], seed=1)


@pytest.mark.parametrize("name", PAGED)
def test_pages(name: str) -> None:
    assert wrong_of(paged_case(name, "cpu")) == []


def test_pages_that_do_not_exist_hold_no_keys() -> None:
    case, masked = with_missing_pages(16, "cpu", packed=True, dtype=FP8)
    with mock.patch("flashtile.call.device.host_readable", return_value=False):
        assert wrong_of(case, masked) == []


def test_stages_of_keys_for_values_in_pages(tmp_path: Path) -> None:
    copy_with_mistake(
        tmp_path / "pages",
        PRODUCER,
        "stages",
        "STAGES: gl.constexpr = CONFIG.v_stages\n    PARTS",
        "STAGES: gl.constexpr = CONFIG.stages\n    PARTS",
    )
    with suppress(EmulationError, RuntimeError):
        assert wrong_of(paged_case("192, hdim 256", "cpu"), folder=tmp_path / "pages") != []


def wrong_of(case: Case, meant: Case | None = None, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds."""
    expected = solve(meant or case)
    with emulated(3, 0, folder) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert launched.count("eight_bit_forward_kernel") == 1
    return [str(x) for x in compare(results, meant or case, expected, rounds_to_eight_bits=True) if not x.ok]


MAINLOOP, TRANSPOSE, FORWARD, SOFTMAX, ROUNDED, PRODUCER = (
    f"kernels/eight_bit/{name}.py" for name in ("mainloop", "transpose", "forward", "softmax", "rounding", "producer")
)
WAIT_VALUES = "consumer_wait(v_transposed, count, CONFIG.transposed_stages)\n    acc"
WAIT_S = "s = warpgroup_mma_wait(0, deps=(s,))\n    "
RELEASE_K = "release_keys(context, count, tile_count, n == wg_tile.tile.lo, warpgroup, CONFIG)\n    "
ADD = "acc, l = add_products(state, alpha, rounded(p), context, count, CONFIG)  # noqa: E741\n    "
RELEASE_V = "consumer_release(v_transposed.empty, count, CONFIG.transposed_stages)\n    "
BUGS = {
    "values are not waited for": (MAINLOOP, WAIT_VALUES, "acc"),
    "keys are released early": (MAINLOOP, WAIT_S + RELEASE_K, RELEASE_K + WAIT_S),
    "values are released before they are multiplied": (MAINLOOP, ADD + RELEASE_V, RELEASE_V + ADD),
    "transposed values without a fence": (TRANSPOSE, "            fence_async_shared()\n", ""),
    "memory of values is not waited for": (
        TRANSPOSE, "producer_acquire(transposed.empty, count, TRANSPOSED_STAGES)", "pass",
    ),
    "values are released unread": (TRANSPOSE, "            consumer_release(v.empty, count, STAGES)\n", ""),
    "another order of keys": (TRANSPOSE, "[4, 1, 0, 2, 3]", "[4, 1, 0, 3, 2]"),
    "p in another order": (ROUNDED, "[first, second, third, fourth]", "[first, third, second, fourth]"),
    "a sink as large as without an offset": (SOFTMAX, "l * LARGEST_P_OF_A_SINK", "l"),
    "values in the dtype of queries": (FORWARD, "v_desc.dtype, [TRANSPOSED_STAGES", "q_desc.dtype, [TRANSPOSED_STAGES"),
    "acc overflows": (SOFTMAX, "max.f32 top, top, other; max.f32 top, top, 0fFF7FFFFF;", ""),
    "a sink in each split": (MAINLOOP, "tile.lse_head < params.batch * outputs.num_heads", "tile.b < params.batch"),
    "the head of queries": (MAINLOOP, "descales.v_descale_h, b, tile.head_k)", "descales.v_descale_h, b, tile.head)"),
}  # fmt: skip
OF_SPLITS = {"a sink in each split"}
OF_BUGS = {
    "a sink as large as without an offset": "sinks",
    "acc overflows": "sinks",
    "a sink in each split": "sinks",
    "values in the dtype of queries": "e5m2",
    "the head of queries": "top left of groups",
}


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs(name: str, tmp_path: Path) -> None:
    folder = tmp_path / f"hopper_{list(BUGS).index(name)}"
    file, old, new = BUGS[name]
    copy_with_mistake(folder, file, name, old, new)
    given = CASES[OF_BUGS[name]] if name in OF_BUGS else call_of(128, 130, 700, causal=True)
    with forced(support, first(stages=1, transposed_stages=1, num_splits=1 + (name in OF_SPLITS))):
        assert any(is_noticed(given, seed, folder) for seed in range(12))


def is_noticed(given: dict[str, Any], seed: int, folder: Path) -> bool:
    try:
        return is_wrong(given, seed, folder)
    except (EmulationError, IndexError):
        return True
