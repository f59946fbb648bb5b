"""The Hopper kernel of latent rows without a GPU: results on the emulation, mistakes that it notices, and its SASS."""

import csv
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from forced import first, forced
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated
from gluon_emulation.machine import EmulationError
from offline.compiled import compile_launch
from offline.families import latent_call
from offline.launches import hopper_launches_of

from flashtile.backend.hopper import support
from flashtile.call.call import Features
from flashtile.call.device import Device
from flashtile.call.problem import Pages, Problem
from flashtile.call.window import Window
from flashtile.dispatch.planner import candidates_of
from flashtile.testing.case import Case
from flashtile.testing.latent import latent
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
H200_MEASURED = H200._replace(clock=1980, bandwidth=4.8143e6)
RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
ROOM = 384  # keys of a sequence's pages


def latent_case(
    heads: int,
    queries: int,
    lengths: tuple[int, ...],
    page_size: int | None = 64,
    dtype: torch.dtype = torch.bfloat16,
    heads_inside: bool = False,
    spread: float = 1,
    **more: Any,
) -> Case:
    """Decoding with as many features as DeepSeek's models have; NaN behind the keys, and pages in any order."""
    generator = torch.Generator().manual_seed(heads + queries)
    shape = (len(lengths), queries, heads, 576) if heads_inside else (len(lengths), heads, queries, 576)
    q = spread * torch.randn(shape, generator=generator)
    q = (q.transpose(1, 2) if heads_inside else q).to(dtype)
    k = torch.randn(len(lengths), 1, ROOM, 576, generator=generator).to(dtype)
    for b, n in enumerate(lengths):
        k[b, :, n:] = torch.nan
    given: dict[str, Any] = {"q": q, "k_cache": k, "cache_seqlens": torch.tensor(lengths).int()}
    if page_size is not None:
        pages = k.transpose(1, 2).reshape(-1, page_size, 1, 576)
        order = torch.randperm(len(pages), generator=generator)
        given["k_cache"] = torch.empty_like(pages).index_copy_(0, order, pages)
        given["page_table"] = order.view(len(lengths), -1).int()
    given |= {"v_cache": given["k_cache"][..., :512], "causal": True, "scale": 192**-0.5} | more
    return latent(Case("attention_with_kvcache", given))


CASES = {
    "sixteen heads": (latent_case(16, 1, (200, 0, 1)), 1),
    "split keys": (latent_case(40, 1, (257, 65)), 2),
    "more splits than keys": (latent_case(8, 3, (130, 3)), 4),
    "heads inside": (latent_case(40, 2, (130,), heads_inside=True), 1),
    "scores far apart": (latent_case(66, 1, (257,), spread=8), 1),
    "dense cache": (latent_case(20, 3, (70, 200), page_size=None, dtype=torch.float16), 1),
    "wide pages": (latent_case(16, 4, (384,), page_size=192, causal=False), 3),
    "negative scale": (latent_case(16, 1, (100,), scale=-0.1), 1),
    "a window's right side": (latent_case(16, 2, (200, 1), window=(None, 3), causal=False), 1),
}


def wrong(case: Case, splits: int, seed: int = 0, folder: Path = FOLDER) -> list[str]:
    with forced(support, first(num_splits=splits)), emulated(3, seed, folder) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert launched == ["latent_forward_kernel", "merge_kernel"][: 1 if splits == 1 else 2]
    return [str(x) for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", CASES)
def test_decoding(name: str) -> None:
    assert wrong(*CASES[name]) == []


def test_results_in_memory_of_the_caller() -> None:
    """Also where its rows are not aligned."""
    case, _ = CASES["negative scale"]
    expected = solve(case)
    for width in (512, 515):
        out = torch.full((1, 16, 1, width), torch.nan, dtype=torch.bfloat16)[..., :512]
        with emulated(3):
            results = replace(case, arguments=case.arguments | {"out": out}).run("hopper")
        assert [str(x) for x in compare(results, case, expected) if not x.ok] == []
        assert torch.equal(out, results["out"])


BUGS = (
    ("release too early", "forward.py", "acc = gemm_wait((first, acc[1]))\n    release(n, 2 * half + 1)",
     "release(n, 2 * half + 1)\n    acc = gemm_wait((first, acc[1]))"),
    ("another block's values", "forward.py", "acc = gemm_rs(acc, other, value_chunks(blocks[0], 1))",
     "acc = gemm_rs(acc, other, value_chunks(blocks[1], 1))"),
    ("sums without a factor", "forward.py", "l = l * alpha  # noqa: E741\n        acc", "acc"),
    ("p before it is there", "handoff.py", "mbarrier.wait(handoff.full[1 - warpgroup].index(0), item & 1)\n    p", "p"),
    ("factors of other rows", "handoff.py", "gl.where(changed != 0, alpha, UNCHANGED)",
     "gl.where(changed != 1, alpha, UNCHANGED)"),
    ("load too early", "producer.py", "producer_acquire(empty_barrier(n, c), count, 1)", "count + 0"),
    ("overlapping splits", "rows.py", "hi = (split + 1) * pairs // rows.num_splits", "hi = pairs"),
)  # fmt: skip


@pytest.mark.bugs
@pytest.mark.parametrize("bug", BUGS, ids=[name for name, *_ in BUGS])
def test_mistakes_are_noticed(bug: tuple[str, str, str, str], tmp_path: Path) -> None:
    """Within some orders of events."""
    name, file, old, new = bug
    folder = tmp_path / f"latent_bug{BUGS.index(bug)}"
    copy_with_mistake(folder, f"kernels/latent/{file}", name, old, new)
    for seed in range(8):
        try:
            if wrong(*CASES["split keys" if seed % 2 else "scores far apart"], seed, folder):
                return
        except EmulationError:
            return
    pytest.fail("not detected")


@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=pytest.mark.sass)])
def test_compiles_for_hopper(splits: int) -> None:
    """The first warpgroup waits for scores, and for values of two blocks in two parts each; the second one for scores,
    for all values of the first block after its softmax, and for those of the second block in two parts.
    """
    launch = hopper_launches_of(latent_call(128), first(num_splits=splits))[0]
    kernel = compile_launch(launch, "sm_90")
    assert (kernel.name, kernel.serialized, kernel.unset) == ("latent_forward", False, ())
    assert kernel.shared <= 227 * 1024
    assert kernel.spilled <= 48
    waits = "".join(re.findall(r"DEPBAR\.LE gsb0, 0x(\d)", kernel.code))
    assert waits in ("01010" + "0010", "0010" + "01010")
    assert kernel.code.count("HGMMA") == 2 * (36 + 2 * 8)


def problem(**changes: Any) -> Problem:
    return replace(Problem.describe(latent_call(128)), **changes)


@pytest.mark.parametrize(("changes", "reason"), [
    ({}, None),
    ({"seqlen_q": 16, "window": Window()}, None),
    ({"dtype": torch.float32}, "neither pages"),
    ({"features": Features(sinks=True)}, "features that change scores"),
    ({"softcap": True}, "features that change scores"),
    ({"batch_invariant": True}, "without batch_invariant"),
    ({"packed": True}, "not packed"),
    ({"num_heads_kv": 2}, "one key head"),
    ({"pages": None, "layout": "dense"}, "caches"),
    ({"window": Window(100, 0)}, "all keys before"),
    ({"pages": Pages(48, True, True)}, "multiples of 64 keys"),
    ({"pages": Pages(100, False, True)}, None),
    ({"head_dim_v": 448}, "multiples of 8 up to 512"),
])  # fmt: skip
def test_declines(changes: dict[str, Any], reason: str | None) -> None:
    found = support.declines(problem(**changes), H200)
    assert found is None if reason is None else reason in (found or "")


@pytest.mark.parametrize(("batch", "splits"), [(128, range(1, 2)), (1, range(48, 65)), (80, range(1, 2))])
def test_splits(batch: int, splits: range) -> None:
    """As many as fill the cores, where there are fewer tiles. Explanations say what runs."""
    found = support.candidates(problem(batch=batch, seqlen_k=16384, fine=None), H200, None)[0]
    assert found.num_splits in splits
    assert "latent rows" in str(found.tile.forward)


def measured_shapes() -> list[tuple[tuple[int, ...], dict[str, float]]]:
    """Batch, heads, queries and keys of each measured call in bfloat16, and microseconds by backend."""
    found: dict[tuple[int, ...], dict[str, float]] = {}
    with (RESULTS / "h200-latent-caches.csv").open() as file:
        for row in csv.DictReader(file):
            shape = tuple(int(row[name]) for name in ("batch", "heads", "queries", "keys"))
            found.setdefault(shape, {})[row["call"]] = float(row["us"])
    return list(found.items())


@pytest.mark.parametrize(("shape", "times"), measured_shapes())
def test_expected_times(shape: tuple[int, ...], times: dict[str, float]) -> None:
    """`auto` takes the faster backend, whose expected time is near the measured one."""
    batch, heads, queries, keys = shape
    decoding = problem(batch=batch, num_heads_q=heads, seqlen_q=queries, seqlen_k=keys, fine=None)
    expected = {
        name: min(way.microseconds for way in candidates_of(name, decoding, H200_MEASURED, None, None))
        for name in ("hopper", "triton")
    }
    chosen = min(expected, key=lambda name: expected[name])
    assert times[chosen] == min(times[name] for name in expected)
    assert 0.6 < expected[chosen] / times[chosen] < 1.5
