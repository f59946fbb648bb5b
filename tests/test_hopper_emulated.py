"""The Hopper kernels' logic without a GPU: `gluon_emulation` runs them, and notices what is wrong with them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from gluon_emulation.backend import FOLDER, emulated
from gluon_emulation.machine import EmulationError
from hopper_variants import VARIANTS, case_of
from seeded_bugs import with_mistake

import flashtile
from flashtile.backend.gpu import replay
from flashtile.backend.hopper import tables
from flashtile.testing.case import Case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

CORES = 3


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wrong(case: Case, seed: int, folder: Path = FOLDER) -> list[str]:
    """What is outside of its bound."""
    with emulated(CORES, seed, folder) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert any(name in launched for name in ("backward_kernel", "wide_keys_kernel")) != case.forward_only
    return [f"{case.description}\n  {x}" for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", VARIANTS)
def test_random_problems_are_within_the_bound(name: str) -> None:
    assert wrong(case_of(name, hash_of(name), "cpu"), seed=0) == []


def test_a_sink_of_infinity_takes_all_the_weight() -> None:
    case = case_of("sinks 64", 1, "cpu", (33, 70))
    sinks = torch.full_like(case.arguments["sinks"], -torch.inf)
    sinks[0] = torch.inf
    case = replace(case, arguments=case.arguments | {"sinks": sinks})
    assert wrong(case, seed=0) == []


def hash_of(name: str) -> int:
    """Another problem for each name, the same in every run."""
    return sum(name.encode())


@pytest.mark.parametrize(
    "name", ["causal 64", "window 64", "grouped heads 64", "packed sinks 64", "grouped heads 96", "packed 96"]
)
def test_three_warpgroups(name: str) -> None:
    """Which are chosen for long sequences only."""
    case = replace(case_of(name, hash_of(name), "cpu"), forward_only=True)
    with mock.patch.multiple(tables, MANY_KEYS=0, triton_version=lambda: tables.WITHOUT_SPILLS):
        assert wrong(case, seed=0) == []


@pytest.mark.parametrize("name", ["causal 64", "sinks 128", "packed sinks 64", "packed 128", "slopes 64"])
def test_steps_are_taken_again_on_other_tensors(name: str) -> None:
    """Of a pass that was written down, with the same lengths and other values."""
    first = case_of(name, 3, "cpu", (129, 200))
    values = {"q": first.arguments["q"].flip(-1), "k": first.arguments["k"] * 0.5, "v": first.arguments["v"] + 1}
    second = replace(first, arguments=first.arguments | {name: x.contiguous() for name, x in values.items()})
    first = replace(first, arguments=first.arguments | {name: first.arguments[name].contiguous() for name in values})
    with emulated(CORES, 0), poisoned_allocation():
        for _ in range(2):  # planned, then recorded
            first.run("hopper")
        with mock.patch.object(replay, "Recorder", side_effect=AssertionError("not replayed")):
            results = second.run("hopper")
    assert [str(x) for x in compare(results, second, solve(second)) if not x.ok] == []


def test_gradients_repeat_bitwise_in_any_order_of_events() -> None:
    """Those that are asked to; without that, dq depends on the order."""
    q, k, v, dout = (torch.randn(1, 3, 400, 128, dtype=torch.float16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def gradients(seed: int, deterministic: bool) -> tuple[Tensor, ...]:
        with emulated(cores=4, seed=seed):
            out = flashtile.attention(*leaves, causal=True, deterministic=deterministic, backend="hopper")
            return out, *torch.autograd.grad(out, leaves, dout)

    first, *others = (gradients(seed, True) for seed in range(4))
    assert all(torch.equal(x, y) for again in others for x, y in zip(again, first, strict=True))
    first, *others = (gradients(seed, False) for seed in range(4))
    assert not all(torch.equal(again[1], first[1]) for again in others)
    assert all(torch.equal(again[n], first[n]) for again in others for n in (0, 2, 3))


@pytest.mark.parametrize(("needed", "kernel"), [("q", "wide_rows_kernel"), ("k", "wide_keys_kernel")])
def test_wide_gradients_that_nobody_needs_are_not_computed(needed: str, kernel: str) -> None:
    tensors = {name: torch.randn(1, 2, 130, 256, dtype=torch.bfloat16) for name in "qkv"}
    tensors[needed].requires_grad_()
    with emulated(CORES, 0) as launched:
        out = flashtile.attention(**tensors, backend="hopper")
        [found] = torch.autograd.grad(out.sum(), [tensors[needed]])
    assert launched == ["forward_kernel", "prepare_kernel", kernel]
    expected = flashtile.attention(**tensors, backend="reference").sum()
    torch.testing.assert_close(found, *torch.autograd.grad(expected, [tensors[needed]]), atol=2e-2, rtol=2e-2)


class Bug(NamedTuple):
    """A mistake in a kernel, and the problem on which it has to be noticed in one of some orders of events."""

    name: str
    file: str
    old: str
    new: str
    variant: str = "causal 128"


WAIT = "s = warpgroup_mma_wait(VALUES, deps=(s,))\n    "
LET_GO = "release(k.gates, n, STAGES)\n    "
LET_Q_GO = "release_q_early(inputs.q_free, tile_count, consumer, block == tile.lo, TILE)\n    "
STORED = ".store(out.to(desc.dtype))"
MEET = "            wait_at(FOR_BOTH, BOTH)\n"
LAST_DK = "            dk, begun = wait_for_all(dk, begun)\n"
ROWS_GO = "            release(rows.gates, count, STAGES)\n"
READ = "tma.store_wait(0)  # the copy engine has read them\n            "
SUMS_GO = "mbarrier.arrive(sums.empty.index(half), count=1)\n            "
DK, DQ_WIDE = (f"            {x} = wait_for_sums({x})\n" for x in ("dk", "dq"))
KEYS_GO = "            release(keys.gates, 2 * count + 1, SLOTS)\n"
DP = "            dp, weight = warpgroup_mma_wait(0, deps=(dp, weight))\n"
VALUES_GO = "            release(keys.gates, 2 * count, SLOTS)\n"
BUGS = (
    Bug("keys let go before their product is there", "kernels/forward/step.py", f"{WAIT}{LET_GO}", f"{LET_GO}{WAIT}"),
    Bug(
        "q let go before its product is there",
        "kernels/forward/step.py",
        f"{WAIT}{LET_GO}{LET_Q_GO}",
        f"{LET_Q_GO}{WAIT}{LET_GO}",
        "causal 256",
    ),
    Bug(
        "nobody says that the first slot is full",
        "kernels/shared/producer.py",
        "mbarrier.arrive(v.full.index(0), count=1)",
        "pass",
    ),
    Bug("values not waited for", "kernels/forward/step.py", "wait_full(v, n, STAGES)", "pass"),
    Bug(
        "wrong phase",
        "kernels/shared/pipeline.py",
        "round_of(n, STAGES) & 1)\n\n\n@gluon.jit\ndef wait_free",
        "0)\n\n\n@gluon.jit\ndef wait_free",
    ),
    Bug("slot never let go", "kernels/forward/step.py", "release(v.gates, n, STAGES)", "pass"),
    Bug(
        "results read before the last ones have left",
        "kernels/shared/epilogue.py",
        "tma.store_wait(0)  # what",
        "# what",
    ),
    Bug(
        "no fence before results are sent",
        "kernels/shared/epilogue.py",
        f"{STORED}\n        fence_async_shared()",
        STORED,
    ),
    Bug(
        "product read in flight",
        "kernels/forward/forward.py",
        "wait_for_sums(add_weighted_rows(",
        "(add_weighted_rows(",
    ),
    Bug("sums that do not follow a level", "kernels/forward/step.py", "softmax.rescaled(acc, alpha, moved)", "acc"),
    Bug(
        "sums that follow the next level",
        "kernels/forward/step.py",
        "gl.where(block == tile.hi - 1, 0, moved)",
        "moved",
    ),
    Bug("sums that never begin anew", "kernels/forward/forward.py", "add = block != first", "pass"),
    Bug("a maximum of two threads", "kernels/shared/branches.py", "bfly.b32 other, top, 2,", "bfly.b32 other, top, 1,"),
    Bug("a row that nobody asks for", "kernels/shared/branches.py", "setp.gt.or.f32 p, limit, $7, p;", ""),
    Bug("guesses kept", "kernels/shared/branches.py", "{again}KEPT", "KEPT"),
    Bug("diagonal off by one", "kernels/shared/masking.py", "(shift + window.right + 1)", "(shift + window.right + 2)"),
    Bug(
        "half of a thread's pair of columns", "kernels/shared/column_masks.py", "gl.minimum(own % 8, 2)", "own % 8 // 2"
    ),
    Bug(
        "a block too few",
        "kernels/shared/masking.py",
        "gl.cdiv(gl.maximum(hi, 0), BLOCK_N), first",
        "gl.maximum(hi, 0) // BLOCK_N, first",
    ),
    Bug("counter left as it is", "kernels/shared/schedule.py", "gl.store(work.counter, 0)", "pass"),
    Bug("no turns", "kernels/backward/dq_sums.py", "turn if TILE.ordered else gl.minimum(turn, 1)", "0"),
    Bug(
        "a turn given before the sums are there",
        "kernels/backward/dq_sums.py",
        "                results_landed()\n",
        "",
    ),
    Bug("half of the gradients of scores", "kernels/backward/fused.py", MEET, ""),
    Bug("no fence before dq's product", "kernels/backward/fused.py", "fence_async_shared()  # for both", "# for both"),
    Bug("no fence before sums are sent", "kernels/backward/dq_sums.py", "fence_async_shared()  # for", "# for"),
    Bug(
        "rows let go before their product is there",
        "kernels/backward/fused.py",
        f"{LAST_DK}{ROWS_GO}",
        f"{ROWS_GO}{LAST_DK}",
    ),
    Bug(
        "a chunk's product read in flight",
        "kernels/backward/fused.py",
        "(2 * CHUNKS, deps=(dq,",
        "(3 * CHUNKS, deps=(dq,",
        "causal 96",
    ),
    Bug("sums overwritten before they are read", "kernels/backward/dq_sums.py", f"{READ}{SUMS_GO}", f"{SUMS_GO}{READ}"),
    Bug(
        "a half of the results over the other",
        "kernels/shared/epilogue.py",
        "if PLACE == 0:",
        "if FIRST == 0:",
        "causal 192/128",
    ),
    Bug(
        "probabilities not waited for",
        "kernels/dkdv/dkdv.py",
        "            wait_at(weights.full.first + slot, weights.full.threads)\n",
        "",
        "causal 256",
    ),
    Bug("rows let go before dk", "kernels/dkdv/dkdv.py", f"{DK}{ROWS_GO}", f"{ROWS_GO}{DK}", "causal 192/128"),
    Bug("keys let go before dq", "kernels/dq/dq.py", f"{DQ_WIDE}{KEYS_GO}", f"{KEYS_GO}{DQ_WIDE}", "causal 256"),
    Bug(
        "values let go before their product is there",
        "kernels/dq/dq.py",
        f"{DP}{VALUES_GO}",
        f"{VALUES_GO}{DP}",
        "causal 256",
    ),
    Bug("packed rows of the next sequence", "kernels/shared/producer.py", "END - seqlen + row", "row", "packed 128"),
)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"bug{BUGS.index(bug)}"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    source = (folder / bug.file).read_text()
    (folder / bug.file).write_text(with_mistake(source, bug.name, bug.old, bug.new))
    for seed in range(8):
        try:
            if wrong(case_of(bug.variant, seed, "cpu", (384, 385)), seed, folder):
                return
        except EmulationError:
            return
    pytest.fail("nobody noticed")
