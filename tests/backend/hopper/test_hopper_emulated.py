"""The Hopper kernels' logic without a GPU: `gluon_emulation` runs them and detects mistakes."""

import importlib
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import again
from again import marked
from float32_cases import case_of as float32_case
from forced import adds_late, first, forced, number
from gluon_emulation.backend import FOLDER, emulated, emulated_kernels
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
