"""Bugs planted into the Hopper kernels: the emulation notices each of them."""

from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

pytest.importorskip("triton")

from forced import adds_late, first, forced, keeps_keys_in_registers
from gluon_emulation.backend import copy_with_mistake
from gluon_emulation.machine import EmulationError
from hopper_variants import case_of
from test_hopper_emulated import wrong

from flashtile.backend.hopper import support
from flashtile.backend.hopper.plan import candidates

pytestmark = pytest.mark.usefixtures("one_thread")


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
