"""The Hopper kernels' logic without a GPU: `gluon_emulation` runs them and detects mistakes."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import again
from again import marked
from float32_cases import case_of as float32_case
from forced import first, forced, number
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated, emulated_kernels
from gluon_emulation.machine import EmulationError
from hopper_variants import VARIANTS, case_of, tiles_of, with_tiles

import flashtile
from flashtile.backend.gpu import replay
from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import candidates
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
CORES = 3
AROUND_TILES = (33, 64, 65, 127, 128, 129, 193, 257)  # longer ones run on a GPU


def wrong(case: Case, seed: int, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds."""
    with emulated(CORES, seed, folder) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert any(name.endswith(("backward_kernel", "dkdv_kernel")) for name in launched) != case.forward_only
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", marked(VARIANTS, again.FIRST_TILES))
def test_random_problems_are_within_the_bound(name: str) -> None:
    assert wrong(case_of(name, hash_of(name), "cpu", AROUND_TILES), seed=0) == []


@pytest.mark.parametrize("name", marked(list(VARIANTS)[::3], again.OTHER_TILES))
def test_all_candidates_give_the_same_results(name: str) -> None:
    """Others than the first one of the tables."""
    seed = hash_of(name) + 1
    with forced(support, number(seed // 7), number(seed // 7)):
        assert wrong(case_of(name, seed, "cpu", AROUND_TILES), seed=0) == []


@pytest.mark.parametrize(("variant", "name"), [("bias of heads 128", "bias"), ("everything 192/128", "alibi_slopes")])
def test_gradients_of_two_backends(variant: str, name: str) -> None:
    """`tiled` has that of a tensor which changes scores, the emulated kernels the others."""
    case = replace(case_of(variant, 3, "cpu", (65, 130)), constant=())
    assert name in case.differentiable()
    expected = solve(case)
    with emulated(CORES, 0) as launched:
        for _ in range(3):  # planned, recorded, replayed
            assert [str(x) for x in compare(case.run(), case, expected) if not x.ok] == []
    assert launched.count("backward_kernel" if name == "bias" else "dkdv_kernel") == 3


@pytest.mark.parametrize(
    "case",
    [
        float32_case((1, 4, 2, 100, 150, 96, 72), values="infinite", causal=True),
        float32_case((1, 1, 1, 70, 40, 128, 128), values="far apart"),
        float32_case((1, 1, 1, 64, 700, 80, 80), values="equal"),
        float32_case((1, 1, 1, 700, 64, 80, 80), values="equal"),
        float32_case((1, 2, 2, 100, 70, 112, 104), values="outliers", scale=-0.2),
        float32_case((1, 2, 2, 70, 80, 72, 72), values="ends"),
    ],
    ids=lambda case: case.description,
)
def test_values_of_float32(case: Case) -> None:
    assert wrong(case, seed=0) == []


def test_two_parts_of_float32() -> None:
    """Where TF32 is allowed, whose 11 bits would give a hundred times the error."""
    case = case_of("float32 causal 128", 0, "cpu", AROUND_TILES)
    name = f"{emulated_kernels().__package__}.launch.float32.allows_tf32"
    with emulated(CORES, 0), mock.patch(name, return_value=True):
        ratios = [x.ratio for x in compare(case.run("hopper"), case, solve(case))]
    assert 0.3 < max(ratios) < 16


def test_a_sink_of_infinity_takes_all_the_weight() -> None:
    case = case_of("sinks 64", 1, "cpu", (33, 70))
    sinks = torch.full_like(case.arguments["sinks"], -torch.inf)
    sinks[0] = torch.inf
    case = replace(case, arguments=case.arguments | {"sinks": sinks})
    assert wrong(case, seed=0) == []


def hash_of(name: str) -> int:
    """A seed for each name, the same in every run."""
    return sum(name.encode())


@pytest.mark.parametrize(
    "name",
    ["full 32", "causal 64", "window 64", "packed sinks 64", "causal 80", "grouped heads 96", "packed 96"],
)
def test_three_warpgroups(name: str) -> None:
    case = replace(case_of(name, hash_of(name), "cpu"), forward_only=True)
    with with_tiles(tiles_of(3)):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize("name", ["full 64", "causal 128"])
def test_short_blocks_of_three_warpgroups(name: str) -> None:
    case = replace(case_of(name, hash_of(name), "cpu"), forward_only=True)
    with with_tiles(tiles_of(3, block_n=64)):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize(("name", "num_splits"), [
    ("causal 64", 5), ("sinks 128", 2), ("window 72", 5), ("top left 64", 2), ("sinks 104/72", 2), ("window 160", 2),
    ("full 256", 5), ("grouped heads 512", 3),
])  # fmt: skip
def test_split_keys(name: str, num_splits: int) -> None:
    """Also more splits than a row has blocks of keys."""
    case = replace(case_of(name, hash_of(name), "cpu", AROUND_TILES), forward_only=True)
    with forced(support, first(num_splits=num_splits)):
        assert wrong(case, seed=0) == []


def test_split_keys_of_rows_that_see_none() -> None:
    q, k, v, dout = (torch.randn(1, 2, n, 64, dtype=torch.bfloat16) for n in (200, 150, 150, 200))
    case = Case("attention", {"q": q, "k": k, "v": v, "causal": True}, dout, None, 0, forward_only=True)
    with forced(support, first(num_splits=2)):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize("name", [f"deterministic {x}" for x in ("full 64", "causal 64", "grouped heads 128")])
def test_several_accumulators_of_dq(name: str) -> None:
    """Also more of them than a row has blocks of keys."""
    case = case_of(name, hash_of(name), "cpu", (65, 300))
    with forced(support, backward=first(dq_parts=3)):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize(("name", "row_splits"), [
    ("causal 40", 2), ("grouped heads 128", 7), ("window 72", 7), ("slopes and window 96", 2),
    ("deterministic full 64", 7), ("dropout 128", 2),
])  # fmt: skip
def test_split_rows(name: str, row_splits: int) -> None:
    """Also more splits than a key has blocks of rows."""
    case = case_of(name, hash_of(name), "cpu", AROUND_TILES)
    with forced(support, backward=first(row_splits=row_splits)):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize(("name", "row_splits", "rows", "keys"), [
    ("full 64", 2, 33, 127), ("full 64", 2, 193, 60), ("causal 80", 1, 193, 60), ("grouped heads 96", 1, 33, 127),
    ("top left 128", 1, 193, 60), ("dropout 128", 3, 33, 127), ("dropout 128", 3, 193, 60),
])  # fmt: skip
def test_one_block_of_keys(name: str, row_splits: int, rows: int, keys: int) -> None:
    """No accumulators of dq, unless blocks of rows see no key."""
    case = replace(VARIANTS[name], seqlen_q=rows, seqlen_k=keys).case(1, "cpu")
    with forced(support, backward=first(row_splits=row_splits)), emulated(CORES, 1) as launched:
        results = case.run("hopper")
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []
    assert ("postprocess_kernel" in launched) == (rows > keys and name != "full 64")


@pytest.mark.parametrize(("name", "rows", "divided"), [
    ("full 128", 577, True), ("full 256", 640, True), ("full 128", 383, False),
])  # fmt: skip
def test_last_wave_of_rows(name: str, rows: int, divided: bool) -> None:
    """The last tiles of the last head as a call of their own with split keys; none where a plan of several lengths
    expects them and whole waves take all tiles.
    """
    case = replace(replace(VARIANTS[name], seqlen_q=rows, seqlen_k=300).case(2, "cpu"), forward_only=True)
    with forced(support, first(last_splits=3)), emulated(CORES, 0) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []
    assert launched == ["forward_kernel", "forward_kernel", "combine_kernel"][: 3 if divided else 1]


@pytest.mark.parametrize(("name", "heads", "row_splits"), [
    ("grouped heads 64", 3, 1), ("deterministic grouped heads 128", 2, 3),
    ("deterministic grouped heads 128", 4, 1), ("slopes and window 96", 4, 1),
])  # fmt: skip
def test_split_heads(name: str, heads: int, row_splits: int) -> None:
    """Heads of a group, alone and with split rows."""
    case = case_of(name, hash_of(name), "cpu", AROUND_TILES)
    with forced(support, backward=first(head_splits=heads, row_splits=row_splits)):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize(("name", "heads"), [
    ("causal 256", 2), ("grouped heads 160", 4), ("window 192", 2), ("dropout 256", 2),
])  # fmt: skip
def test_split_heads_of_wide_kernels(name: str, heads: int) -> None:
    case = replace(VARIANTS[name], heads=(4, 1)).case(hash_of(name), "cpu", AROUND_TILES)
    with forced(support, backward=first(head_splits=heads)):
        assert wrong(case, seed=0) == []


def adds_late(config: Any) -> bool:
    return config.late_dq is not None


def keeps_keys_in_registers(config: Any) -> bool:
    return config.dkdv.keys_in_registers


@pytest.mark.parametrize(("name", "row_splits"), [
    ("full 128", 1), ("full 128", 3), ("causal 80", 1), ("grouped heads 96", 1), ("causal 96", 2), ("causal 128", 1),
    ("full 64", 1), ("grouped heads 64", 1),
])  # fmt: skip
def test_late_dq(name: str, row_splits: int) -> None:
    """Also with more rows than keys."""
    package = emulated_kernels().__package__
    case = case_of(name, hash_of(name), "cpu", (193, 255, 384, 288))
    mainloop = importlib.import_module(f"{package}.kernels.backward.mainloop")
    with (
        mock.patch.object(candidates, "DQ_LENGTH", 193),
        forced(support, backward=first(where=adds_late, row_splits=row_splits)),
        mock.patch.object(mainloop, "add_dq", side_effect=mainloop.add_dq) as add_dq,
    ):
        assert wrong(case, seed=0) == []
    assert add_dq.call_count > 0


@pytest.mark.parametrize(("name", "heads_at_once"), [
    ("full 64", 1), ("full 32", 4), ("dropout 64", 4), ("grouped heads 128", 1),
])  # fmt: skip
def test_last_wave(name: str, heads_at_once: int) -> None:
    """Blocks of keys of the last head, or of the last ones, of whose rows several programs have parts."""
    case = replace(VARIANTS[name], seqlen_q=129, seqlen_k=300).case(4, "cpu")
    wave = first(heads_at_once=heads_at_once, last_splits=2)
    with forced(support, backward=wave), emulated(5, 0) as launched:
        results = case.run("hopper")
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []
    assert launched.count("backward_kernel") == 2


@pytest.mark.parametrize(("name", "row_chunks", "row_splits"), [
    ("full 64", 2, 1), ("full 64", 7, 1), ("grouped heads 128", 7, 1), ("grouped heads 128", 2, 2),
    ("deterministic causal 96", 2, 1), ("deterministic causal 96", 2, 2), ("window 96", 7, 1), ("window 96", 2, 2),
])  # fmt: skip
def test_chunks_of_rows(name: str, row_chunks: int, row_splits: int) -> None:
    """Also more chunks than there are blocks of rows, and chunks that several programs share."""
    case = case_of(name, hash_of(name), "cpu", AROUND_TILES)
    with forced(support, backward=first(row_chunks=row_chunks, row_splits=row_splits)):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize("name", ["causal 64", "sinks 128", "packed sinks 64", "packed 128", "slopes 64"])
def test_replay_on_other_tensors(name: str) -> None:
    """A replayed call with the same layouts and other values."""
    first = case_of(name, 3, "cpu", (65, 130))
    values = {"q": first.arguments["q"].flip(-1), "k": first.arguments["k"] * 0.5, "v": first.arguments["v"] + 1}
    second = replace(first, arguments=first.arguments | {name: x.contiguous() for name, x in values.items()})
    first = replace(first, arguments=first.arguments | {name: first.arguments[name].contiguous() for name in values})
    unread = mock.patch("flashtile.call.device.host_readable", return_value=False)  # lengths, as on a GPU
    with emulated(CORES, 0), unread, poisoned_allocation():
        for _ in range(2):  # planned, then recorded
            first.run("hopper")
        with mock.patch.object(replay, "Recorder", side_effect=AssertionError("not replayed")):
            results = second.run("hopper")
    assert [str(x) for x in compare(results, second, solve(second)) if not x.ok] == []


def test_nan_outside_of_all_sequences_stays_there() -> None:
    """A softcap's derivative of it is NaN, and no factor of 0 makes that 0."""
    q, dout = (torch.randn(5, 1, 192, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(3, 1, 192, dtype=torch.bfloat16) for _ in range(2))
    q[4] = dout[4] = torch.nan
    offsets = {f"cu_seqlens_{x}": torch.tensor([0, n], dtype=torch.int32) for x, n in (("q", 4), ("k", 3))}
    case = Case("attention_varlen", {"q": q, "k": k, "v": v, "softcap": 5.0} | offsets, dout, None, 0)
    assert wrong(case, seed=0) == []


def test_gradients_repeat_bitwise_in_any_order_of_events() -> None:
    """With deterministic=True; without it, dq depends on the order, dk and dv do not."""
    q, k, v, dout = (torch.randn(1, 2, 320, 64, dtype=torch.float16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients(seed: int, deterministic: bool) -> tuple[Tensor, ...]:
        with emulated(cores=6, seed=seed):
            out = flashtile.attention(*leaves, causal=True, deterministic=deterministic, backend="hopper")
            return out, *torch.autograd.grad(out, leaves, dout)

    first, *others = (gradients(seed, True) for seed in range(4))
    assert all(torch.equal(x, y) for again in others for x, y in zip(again, first, strict=True))
    first, *others = (gradients(seed, False) for seed in range(4))
    assert not all(torch.equal(again[1], first[1]) for again in others)
    assert all(torch.equal(again[n], first[n]) for again in others for n in (0, 2, 3))


@pytest.mark.parametrize(("needed", "kernel", "head_dim"), [
    ("q", "dq_kernel", 256), ("k", "dkdv_kernel", 256), ("k", "wide_dkdv_kernel", 264), ("v", "wide_dkdv_kernel", 264),
])  # fmt: skip
def test_split_backward_computes_needed_gradients_only(needed: str, kernel: str, head_dim: int) -> None:
    tensors = {name: torch.randn(1, 2, 130, head_dim, dtype=torch.bfloat16) for name in "qkv"}
    tensors[needed].requires_grad_()
    with emulated(CORES, 0) as launched:
        out = flashtile.attention(**tensors, backend="hopper")
        [gradient] = torch.autograd.grad(out.sum(), [tensors[needed]])
    assert launched == ["forward_kernel" if head_dim == 256 else "wide_forward_kernel", "preprocess_kernel", kernel]
    expected = flashtile.attention(**tensors, backend="reference").sum()
    torch.testing.assert_close(gradient, *torch.autograd.grad(expected, [tensors[needed]]), atol=2e-2, rtol=2e-2)


class Bug(NamedTuple):
    """A mistake in a kernel, and the problem on which the emulation has to notice it within some orders of events."""

    name: str
    file: str
    old: str
    new: str
    variant: str = "causal 128"
    lengths: tuple[int, int] = (192, 257)
    seed: int = 1  # the first order of events that is tried


MAINLOOP, PIPELINE = "kernels/forward/mainloop.py", "kernels/shared/pipeline.py"
FORWARD, PRODUCER = "kernels/forward/forward.py", "kernels/forward/producer.py"
EPILOGUE, MASKING, SOFTMAX = (f"kernels/shared/{name}.py" for name in ("epilogue", "masking", "softmax_ptx"))
SCHEDULER, COLUMN_MASKS = "kernels/shared/tile_scheduler.py", "kernels/shared/column_masks.py"
STEPS, DQ_SHARE, DQ_WRITER = (f"kernels/backward/{name}.py" for name in ("mainloop", "dq_share", "dq_writer"))
KEY_SCHEDULER, ROW_PRODUCER = (f"kernels/backward/{name}.py" for name in ("tile_scheduler", "producer"))
DQ, DKDV, KEYS = "kernels/dq/dq.py", "kernels/dkdv/dkdv.py", "kernels/dkdv/keys.py"
LATE_DQ = "kernels/backward/late_dq.py"
FLOAT32, PARTS = "kernels/float32/forward.py", "kernels/shared/parts.py"
PREPROCESS = "kernels/preprocess.py"
COORDINATES, SWIZZLE = "kernels/shared/coordinates.py", "kernels/shared/swizzle.py"
SLOPES, PACKED_SLOPES = "kernels/backward/slopes.py", "packed slopes of sequences 128"
WIDE, HANDOFF, WIDE_DKDV = (f"kernels/wide/{name}.py" for name in ("forward", "handoff", "dkdv"))
DROPOUT, PHILOX = "kernels/shared/dropout.py", "kernels/shared/philox_ptx.py"

WAIT_S = "s = warpgroup_mma_wait(PV_GEMMS, deps=(s,))\n    "
READ_PAIRS = (
    "bias = tile_bias(pipelines.bias, count, warpgroup, CONFIG)\n    "
    "pairs = pair_block(context.params, wg_tile, block, bias, CONFIG)\n    "
    "loaded = Loaded(loaded.head, loaded.rows, of_keys, partial, pairs)\n    "
)
ROW_SUM = "l = state.l * alpha + softmax.thread_row_sum(p)  # noqa: E741\n    "
DROP_P = "p = where_kept(kept, p, False)\n    "
RELEASE_K = "consumer_release(k.empty, count, STAGES)\n    "
RELEASE_Q = "release_q_early(pipelines.q_empty, tile_count, warpgroup, n == tile.lo, CONFIG)\n    "
STORE_SMEM = ".store(out.to(desc.dtype))"
DS_BARRIER = "    barrier_sync(DS_BARRIER, CONSUMER_THREADS)\n"
WAIT_DK = "        dk, partial_p = gemm_wait_with(dk, partial_p)\n"
RELEASE_ROWS = "        consumer_release(rows.empty, count, STAGES)\n"
WAIT_READ = "    tma.store_wait(0)\n"
RELEASE_DQ = "    mbarrier.arrive(dq_pipeline.empty.index(warpgroup), count=1)\n"
SPLIT_DK = "            dk = add_product(dk, ds, stage_chunks(rows.q, count, STAGES, HEAD_DIM), dtype, HEAD_DIM)\n"
SPLIT_DQ = "            dq = add_product(dq, ds, stage_chunks(kv, 2 * opaque(count) + 1, KV_STAGES, HEAD_DIM), dtype, "
SPLIT_DQ += "HEAD_DIM)\n"
RELEASE_DQ_K = "            consumer_release(kv.empty, 2 * count + 1, KV_STAGES)\n"
WAIT_DP = "            dp, ds_weight = warpgroup_mma_wait(0, deps=(dp, ds_weight))\n"
WAIT_DP += "            dp = large_product(dout_i, v_j, dp, PARTS)\n"
FLOAT32_SCORES = "            t = large_product(q_i, k_j, warpgroup_mma_wait(0, deps=(s,)), HEAD_DIM.parts)\n"
RELEASE_FLOAT32_K = "            consumer_release(kv.empty, 2 * count, STAGES)\n"
RELEASE_DQ_V = "            consumer_release(kv.empty, 2 * count, KV_STAGES)\n"
BUGS = (
    Bug(
        "keys released before their product is complete",
        MAINLOOP,
        f"{WAIT_S}{READ_PAIRS}{RELEASE_K}",
        f"{RELEASE_K}{WAIT_S}{READ_PAIRS}",
        lengths=(384, 385),
        seed=2,
    ),
    Bug(
        "q released before its product is complete",
        MAINLOOP,
        f"{WAIT_S}{READ_PAIRS}{RELEASE_K}{RELEASE_Q}",
        f"{RELEASE_Q}{WAIT_S}{READ_PAIRS}{RELEASE_K}",
        "causal 256",
        seed=2,
    ),
    Bug("first stage never full", PRODUCER, "leave_unwritten(v, HEAD_DIM_V)", "pass"),
    Bug("no wait for values", MAINLOOP, "consumer_wait(v, count, STAGES)", "pass"),
    Bug(
        "wrong phase",
        PIPELINE,
        "wraps_of(count, STAGES) & 1)\n\n\n@gluon.jit\ndef producer_acquire",
        "0)\n\n\n@gluon.jit\ndef producer_acquire",
    ),
    Bug("stage never released", MAINLOOP, "consumer_release(v.empty, count, STAGES)", "pass"),
    Bug(
        "skipped stage never released",
        MAINLOOP,
        "consumer_release(v.empty, count + step, CONFIG.stages)",
        "pass",
        "causal 96",
    ),
    Bug(
        "skipped stages released before they are full",
        MAINLOOP,
        "consumer_wait(k, count + step, CONFIG.stages)\n        consumer_wait(v, count + step, CONFIG.stages)",
        "pass",
        "causal 96",
        (448, 449),
    ),
    Bug(
        "q without rows never released",
        MAINLOOP,
        "warpgroup, steps > 0, CONFIG",
        "warpgroup, False, CONFIG",
        "causal 256",
    ),
    Bug("staged output overwritten before it is read", EPILOGUE, "tma.store_wait(0)  # TMA", "# TMA"),
    Bug("no fence before the output is stored", EPILOGUE, f"{STORE_SMEM}\n        fence_async_shared()", STORE_SMEM),
    Bug("product read in flight", FORWARD, "gemm_wait(gemm_rs(", "(gemm_rs("),
    Bug("acc not rescaled", MAINLOOP, "softmax.rescale(acc, alpha, changed)", "acc", seed=0),
    Bug("acc rescaled by the next tile", MAINLOOP, "gl.where(n == tile.hi - 1, 0, changed)", "changed"),
    Bug("acc never reset", FORWARD, "accumulate = n != first", "pass"),
    Bug("row maximum of two threads", SOFTMAX, "bfly.b32 other, top, 2,", "bfly.b32 other, top, 1,"),
    Bug("second row without a vote", SOFTMAX, "setp.gt.or.f32 p, limit, $7, p;", ""),
    Bug("stale speculative exponentials", SOFTMAX, "{repeated}KEPT", "KEPT"),
    Bug("diagonal off by one", MASKING, "(shift + bounds.window_right + 1)", "(shift + bounds.window_right + 2)"),
    Bug("half of a thread's pair of columns", COLUMN_MASKS, "gl.minimum(bound % 8, 2)", "bound % 8 // 2"),
    Bug(
        "one block too few",
        MASKING,
        "gl.cdiv(gl.maximum(hi, 0), BLOCK_N), first",
        "gl.maximum(hi, 0) // BLOCK_N, first",
    ),
    Bug(
        "tile semaphore not reset between chunks",
        SCHEDULER,
        "gl.store(scheduler.tile_count_semaphore, 0)",
        "pass",
        "full 64",
    ),
    Bug("no wait for the dq semaphore", DQ_WRITER, "position if CONFIG.in_order else gl.minimum(position, 1)", "0"),
    Bug("dq semaphore released before the store", DQ_WRITER, "                    wait_stores_complete()\n", ""),
    Bug("half of ds", DQ_SHARE, DS_BARRIER, ""),
    Bug("ds of missing keys left from before", DQ_SHARE, "if step < DS_STAGES:", "if step < 1:", "full 64", (300, 190)),
    Bug("no fence before dq's product", DQ_SHARE, "fence_async_shared()  # for both", "# for both"),
    Bug("no fence before dq is written", DQ_WRITER, "fence_async_shared()  # for", "# for"),
    Bug("rows released before dk is complete", STEPS, f"{WAIT_DK}{RELEASE_ROWS}", f"{RELEASE_ROWS}{WAIT_DK}", seed=9),
    Bug("one chunk's product read in flight", STEPS, "(2 * CHUNKS, deps=(dq,", "(3 * CHUNKS, deps=(dq,", "causal 96"),
    Bug("dq in another order", SWIZZLE, "[0, 2, 1, 3, 4, 6, 5, 7]", "[0, 2, 4, 1, 3, 6, 5, 7]", "causal 80"),
    Bug(
        "staged dq overwritten before it is read",
        DQ_WRITER,
        f"{WAIT_READ}{RELEASE_DQ}",
        f"{RELEASE_DQ}{WAIT_READ}",
        seed=7,
    ),
    Bug("one half of the output over the other", EPILOGUE, "if OFFSET == 0:", "if FIRST == 0:", "causal 192/128"),
    Bug(
        "no wait for probabilities",
        DKDV,
        "            barrier_sync(weights.full.first + stage, weights.full.threads)\n",
        "",
        "causal 256",
    ),
    Bug(
        "rows released before split dk is complete",
        DKDV,
        f"{SPLIT_DK}    {RELEASE_ROWS}",
        f"    {RELEASE_ROWS}{SPLIT_DK}",
        "causal 192/128",
        (384, 385),
        seed=0,
    ),
    Bug(
        "keys released before dq is complete",
        DQ,
        f"{SPLIT_DQ}{RELEASE_DQ_K}",
        f"{RELEASE_DQ_K}{SPLIT_DQ}",
        "causal 256",
        seed=4,
    ),
    Bug(
        "values released before dp is complete",
        DQ,
        f"{WAIT_DP}{RELEASE_DQ_V}",
        f"{RELEASE_DQ_V}{WAIT_DP}",
        "causal 256",
        seed=3,
    ),
    Bug(
        "keys released before float32 scores are complete",
        FLOAT32,
        f"{FLOAT32_SCORES}{RELEASE_FLOAT32_K}",
        f"{RELEASE_FLOAT32_K}{FLOAT32_SCORES}",
        "float32 causal 128",
        (129, 300),
    ),
    Bug("float32 sums not rescaled", FLOAT32, "HEAD_DIM, alpha)", "HEAD_DIM)", "float32 causal 128", (129, 300)),
    Bug("lowest parts left out", PARTS, "(0, 2, 1, 0, 1)", "(0, 1, 1, 0, 1)", "float32 causal 128", (1, 30)),
    Bug("dropout before the row's sum", MAINLOOP, f"{ROW_SUM}{DROP_P}", f"{DROP_P}{ROW_SUM}", "dropout 64"),
    Bug("bits of another thread", PHILOX, "(2, 2), ((1, 1,", "(2, 2), ((1, 2,", "dropout 64", (1, 30)),
    Bug("bits of another thread in backward", PHILOX, "(2, 8, 0x5410", "(2, 4, 0x5410", "dropout 64", (1, 30)),
    Bug("octets of the wider block", DROPOUT, "octet + CALLS * thread", "octet + 4 * thread", "dropout 256", (1, 30)),
    Bug(
        "dropped pairs in dp",
        STEPS,
        "dp, p = both_where_kept(block.kept",
        "_, p = both_where_kept(block.kept",
        "dropout 128",
        (1, 30),
    ),
    Bug(
        "bits of the block before",
        STEPS,
        "coord.first_row, first_key, zeros",
        "gl.maximum(coord.first_row - CONFIG.block_m, 0), first_key, zeros",
        "dropout 128",
        (129, 130),
    ),
    Bug("no wait for keys in registers", KEYS, "consumer_wait(rows, count, CONFIG.stages)", "pass", "window 192"),
    Bug("dv without dropout's factor", DKDV, "else dropout.keep_scale", "else 1.0", "dropout 256", (1, 30)),
    Bug("slopes of another head", SLOPES, "num_heads + block.head", "num_heads + tile.head_k", "slopes and window 96"),
    Bug("distances off by one", SLOPES, "block.first_row + block.shift", "block.first_row", "slopes 64", (33, 70)),
    Bug("blocks of the sequence before", SLOPES, "CONFIG.block_n + tile.b", "CONFIG.block_n", PACKED_SLOPES, (33, 70)),
    Bug("dk stored over that of earlier chunks", EPILOGUE, "if ADD:", "if False:", "full 64"),
    Bug("dv over ds that is read", LATE_DQ, "count + stored % 2,", "count + 2 + stored % 2,", "causal 96", (255, 384)),
    Bug("rows of two chunks", KEY_SCHEDULER, "gl.minimum(hi, scheduler.chunk.chunk_hi)", "hi", "full 64"),
    Bug("tiles counted from anything", PREPROCESS, "tl.store(tile_count_semaphore, 0)", "pass", "packed 128"),
    Bug("keys of a chunk in use", WIDE, "warpgroup_mma_wait(1, deps=(s,))", "s", "window 320", (130, 200)),
    Bug("other half starts in the next block", WIDE, "n > tile.lo,", "n > tile.lo + 1,", "window 320", (65, 130)),
    Bug("other half not rescaled", WIDE, "acc = softmax.rescale(acc, alpha, changed)", "pass", "window 320", (65, 300)),
    Bug(
        "other half keeps its values",
        WIDE,
        "consumer_release(chunk_empty(v, FIRST + c), 0, 1)\n            item",
        "pass\n            item",
        "window 320",
        (65, 130),
    ),
    Bug(
        "p of the next block",
        HANDOFF,
        "mbarrier.wait(handoff.empty.index(0), (item & 1) ^ 1)\n    handoff.p",
        "handoff.p",
        "window 320",
        (130, 200),
    ),
    Bug("p before it is there", HANDOFF, "mbarrier.wait(handoff.full.index(0), item & 1)\n    p", "p", "window 320"),
    Bug(
        "rows that the other half of dq reads",
        DQ,
        "make_mbarriers(ROW_GROUPS, CONFIG.column_groups)",
        "make_mbarriers(ROW_GROUPS, 1)",
        "window 320",
        (130, 65),
    ),
    Bug(
        "ds before it is there",
        WIDE_DKDV,
        "barrier_sync(factors.full.first + stage, factors.full.threads)",
        "pass",
        "window 320",
        (65, 65),
    ),
    Bug(
        "weights before they are there",
        WIDE_DKDV,
        "barrier_sync(weights.full.first + stage, weights.full.threads)",
        "pass",
        "window 320",
        (65, 65),
    ),
    Bug("statistics between two lines", ROW_PRODUCER, "max(1, 32 // rows)", "1", "window 320", (33, 65)),
    Bug("dv's halves alike", WIDE_DKDV, "chunks_of(dout_i, COLUMNS)", "dout_i[:2]", "window 320", (33, 65)),
    Bug("rows of the next packed sequence", COORDINATES, "RAGGED_EXTENT - seqlen + row", "row", "packed 128"),
)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"bug{BUGS.index(bug)}"
    copy_with_mistake(folder, bug.file, bug.name, bug.old, bug.new)
    backward = first(row_chunks=2) if "chunks" in bug.name else first()
    if bug.file in (LATE_DQ, KEYS):
        backward = first(where=adds_late if bug.file == LATE_DQ else keeps_keys_in_registers)
    with mock.patch.object(candidates, "DQ_LENGTH", 193), forced(support, backward=backward):
        for seed in range(bug.seed, bug.seed + 8):
            try:
                if wrong(case_of(bug.variant, seed, "cpu", bug.lengths), seed, folder):
                    return
            except EmulationError:
                return
    pytest.fail("not detected")
