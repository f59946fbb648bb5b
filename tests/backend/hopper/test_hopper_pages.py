"""Keys in pages in the Hopper forward kernel, on the emulation."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from forced import first, forced
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated
from gluon_emulation.machine import EmulationError
from hopper_variants import tiles_of, with_tiles
from paged_cases import CASES, Paged, with_missing_pages

from flashtile.backend.gpu import replay
from flashtile.backend.hopper import support
from flashtile.call.device import Device
from flashtile.errors import BackendError
from flashtile.testing.case import Case
from flashtile.testing.generate import random_case
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
H200 = Device("cuda", "NVIDIA H200", "sm_90", 132)
FUNCTIONS = ("attention_varlen", "attention_with_kvcache")
TAKEN = (1, 29, 382, 471, 505, 601, 607, 830, 1153, 1167, 1476, 1973, 2104, 2403, 2405)  # seeds
ON_DEVICE = {"target": "flashtile.call.device.host_readable", "return_value": False}


def wrong(case: Case, seed: int = 0, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds."""
    with emulated(3, seed, folder) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert launched.count("forward_kernel") == 1
    return [str(x) for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", CASES)
def test_pages(name: str) -> None:
    assert wrong(CASES[name].case(0, "cpu")) == []


@pytest.mark.parametrize("name", ["16", "64, window"])
def test_three_warpgroups(name: str) -> None:
    case = replace(CASES[name], head_dim=64, head_dim_v=None).case(1, "cpu")
    with with_tiles(tiles_of(3)):
        assert wrong(case) == []


@pytest.mark.parametrize(
    ("name", "num_splits"),
    [("8 keys a page", 2), ("8 keys a page", 7), ("32, full", 2), ("256", 3), ("dense cache", 2)],
)
def test_split_keys(name: str, num_splits: int) -> None:
    """Also more splits than a sequence has blocks of keys."""
    with forced(support, first(num_splits=num_splits)):
        assert wrong(CASES[name].case(2, "cpu")) == []


def test_packed_queries_are_not_split() -> None:
    with forced(support, first(num_splits=2)):
        assert wrong(CASES["16"].case(2, "cpu")) == []


@pytest.mark.parametrize(("size", "packed"), [(8, False), (16, True), (40, True), (64, False)])
def test_pages_that_do_not_exist_hold_no_keys(size: int, packed: bool) -> None:
    """As if a mask hid their keys."""
    case, masked = with_missing_pages(size, "cpu", packed=packed)
    expected = solve(masked)
    with mock.patch(**ON_DEVICE), emulated(3, 0):
        results = case.run("hopper")
    assert [str(x) for x in compare(results, masked, expected) if not x.ok] == []


@pytest.mark.parametrize(("given", "meant"), [(-5, 0), (10**6, 144)])
def test_lengths_that_do_not_exist(given: int, meant: int) -> None:
    """A negative length is 0, and one beyond the table's room is that room."""
    case = Paged(16, keys=(1, 128, 131), queries=20).case(5, "cpu")
    assert case.arguments["page_table"].shape[1] * 16 == 160
    case.arguments["page_table"] = case.arguments["page_table"][:, :9].contiguous()
    pages, lengths = case.arguments["page_table"], case.arguments["cache_seqlens"]
    pages[1, 8] = next(page for page in range(30) if page not in pages[pages >= 0])
    for name in ("k_cache", "v_cache"):
        x = case.arguments[name]
        x[x.isnan()] = 0.5
    lengths[1] = meant
    expected = solve(case)
    changed = replace(case, arguments=case.arguments | {"cache_seqlens": lengths.where(lengths != meant, given)})
    with mock.patch(**ON_DEVICE), emulated(3, 0):
        results = changed.run("hopper")
    assert [str(x) for x in compare(results, case, expected) if not x.ok] == []


@pytest.mark.parametrize("name", ["16", "24, hdim 96", "dense cache"])
def test_replay(name: str) -> None:
    """A call that is planned, recorded, and replayed."""
    case = CASES[name].case(4, "cpu")
    with mock.patch(**ON_DEVICE), emulated(3, 0), poisoned_allocation():
        results = [case.run("hopper"), case.run("hopper")]
        with mock.patch.object(replay, "Recorder", side_effect=AssertionError("not replayed")):
            results.append(case.run("hopper"))
    expected = solve(case)
    assert [str(x) for found in results for x in compare(found, case, expected) if not x.ok] == []


@pytest.mark.parametrize("seed", TAKEN)
def test_random_calls(seed: int) -> None:
    """Random calls of the contract that the kernels take: appended to, rotated, split, of other layouts."""
    case = replace(random_case(seed, function=FUNCTIONS[seed % 2]), forward_only=True)
    assert wrong(case, seed) == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Paged(20), "multiples of 8"),
        (Paged(4), "multiples of 8"),
        (replace(Paged(203, dense_cache=True), dtype=torch.float32), "in float32"),
    ],
)
def test_declined_pages(call: Paged, reason: str) -> None:
    with emulated(), pytest.raises(BackendError, match=reason):
        call.case(0, "cpu").run("hopper")


def test_pages_apart_are_declined() -> None:
    """Pages that do not begin a whole number of rows apart."""
    case = Paged(16).case(0, "cpu")
    for name in ("k_cache", "v_cache"):
        x = case.arguments[name]
        buffer = torch.empty(x.shape[0], x[0].numel() + 8, dtype=x.dtype)
        case.arguments[name] = buffer[:, : x[0].numel()].view(x.shape).copy_(x)
    with emulated(), pytest.raises(BackendError, match="whole numbers of rows apart"):
        case.run("hopper")


class Bug(NamedTuple):
    """A mistake in a kernel, and the problem on which the emulation has to notice it."""

    name: str
    file: str
    old: str
    new: str
    case: str = "16"


PAGES, PRODUCERS = "kernels/shared/pages.py", "kernels/forward/page_producers.py"
SCHEDULER = "kernels/shared/tile_scheduler.py"
KEYS = "acquire_and_load_pages(pipelines.k, k_desc, tile.head_k, parts, count, HEAD_DIM, CONFIG)"
FROM_LANES = "from_lane(stop, part), from_lane(row, part)"
LENGTH = "gl.minimum(tile.seqlen_k - (key - row), pages.page_size)"
BUGS = (
    Bug("keys of the next block's pages", PRODUCERS, KEYS, KEYS.replace("parts", "next_parts")),
    Bug("values a step early", PRODUCERS, "tile_count = 0\n    count = 1\n", "tile_count = 0\n    count = 0\n"),
    Bug("first stage never full", PRODUCERS, "leave_unwritten(pipelines.v, HEAD_DIM_V)", "pass"),
    Bug("rows past the last key", PAGES, LENGTH, "pages.page_size"),
    Bug("one page for a block", PAGES, FROM_LANES, FROM_LANES.replace("part", "0")),
    Bug(
        "rows in the page", PAGES, "return key // PAGE_SIZE, key % PAGE_SIZE", "return key // PAGE_SIZE, key * 0", "256"
    ),
    Bug("panels side by side", PAGES, "(stage * PANELS + n) * PARTS + part", "(stage * PARTS + part) * PANELS + n"),
    Bug("entries past the end", PAGES, "(key >= 0) & (key < tile.seqlen_k)", "key >= 0"),
    Bug("room instead of length", SCHEDULER, "gl.minimum(seqlen, gl.maximum(used, 0))", "seqlen", "8 keys a page"),
)


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"pages_bug{BUGS.index(bug)}"
    copy_with_mistake(folder, bug.file, bug.name, bug.old, bug.new)
    for seed in range(3):
        try:
            if wrong(CASES[bug.case].case(seed, "cpu"), seed, folder):
                return
        except EmulationError:
            return
    pytest.fail("not detected")
