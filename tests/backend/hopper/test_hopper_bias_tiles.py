"""Biases that TMA loads in tiles, in the Hopper kernels without a GPU: emulated, with planted bugs."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from checking import dense_case
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated, emulated_kernels
from gluon_emulation.machine import EmulationError
from variants import Variant, bias

from flashtile.testing.case import Case, MaskFunction
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")


class Problem(NamedTuple):
    """A call with a bias of 16-bit numbers, whose rows are aligned to 16 bytes if no other is said."""

    head_dim: int
    lengths: tuple[int, int]
    kept: tuple[bool, bool] = (False, True)  # whether the bias differs between sequences, and between heads
    heads: tuple[int, int] = (2, 2)
    deterministic: bool = False
    more: tuple[tuple[str, Any], ...] = ()


KEYS = torch.arange(264) % 200 < 150
LATER = MaskFunction(lambda b, h, i, j, first: j >= first[i], (torch.arange(200) // 3,))
PROBLEMS = {
    "one bias 64": Problem(64, (130, 264)),
    "of sequences 64": Problem(64, (257, 136), (True, True), (4, 2)),
    "one bias 32": Problem(32, (130, 264), heads=(4, 2)),
    "of nothing 48": Problem(48, (65, 400), (False, False)),
    "unaligned rows of one bias 64": Problem(64, (70, 133), (False, False), (8, 2)),
    "unaligned rows of sequences 32": Problem(32, (70, 140), (True, False), (4, 2)),
    "one bias 80": Problem(80, (130, 200)),
    "one bias 96": Problem(96, (130, 200)),
    "one bias 128": Problem(128, (150, 264), (True, False), (4, 1), deterministic=True),
    "causal 64": Problem(64, (300, 264), more=(("causal", True),)),
    "window 128": Problem(128, (200, 400), more=(("window", (90, 20)),)),
    "mask 64": Problem(64, (200, 264), more=(("mask", KEYS[None, None, None]),)),
    "mask function 64": Problem(64, (200, 264), more=(("mask", LATER),)),
    "slopes 64": Problem(64, (140, 136), more=(("alibi_slopes", torch.tensor([0.1, 0.02])),)),
}


def case_of(problem: Problem) -> Case:
    (heads_q, heads_k), (rows, keys) = problem.heads, problem.lengths
    case = dense_case(
        batch=1 + problem.kept[0], num_heads_q=heads_q, num_heads_kv=heads_k, seqlen_q=rows, seqlen_k=keys,
        head_dim=problem.head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    shape = [n if kept else 1 for n, kept in zip((2, heads_q), problem.kept, strict=True)]
    values = torch.randn(*shape, rows, keys, generator=torch.Generator().manual_seed(1)).bfloat16()
    arguments = case.arguments | {"bias": values} | dict(problem.more)
    return replace(case, arguments=arguments, constant=("bias", "alibi_slopes"), description="")


def results_of(case: Case, folder: Path = FOLDER, *, deterministic: bool = False) -> dict[str, torch.Tensor]:
    """Results of kernels that read tiles."""
    package = emulated_kernels(folder).__package__
    tiles, lists = (importlib.import_module(f"{package}.{name}") for name in ("launch.bias_tiles", "plan.listed"))
    with (
        mock.patch.object(tiles, "dense_descriptor", wraps=tiles.dense_descriptor) as made,
        mock.patch.multiple(lists, LEAST_PAIRS=0, LEAST_MASK_PAIRS=0),
        emulated(1 if deterministic else 3, 0, folder),
        poisoned_allocation(),
    ):
        results = case.run("hopper", deterministic=deterministic)
    assert len({call.args[1] for call in made.call_args_list}) == 2  # boxes of forward and of backward
    return results


def wrong(problem: Problem, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds."""
    case = case_of(problem)
    results = results_of(case, folder, deterministic=problem.deterministic)
    return [str(x) for x in compare(results, case, solve(case)) if not x.ok]


@pytest.mark.parametrize("name", PROBLEMS)
def test_within_the_bound(name: str) -> None:
    assert wrong(PROBLEMS[name]) == []


def test_packed_sequences() -> None:
    """Positions in a bias count from the start of each sequence."""
    variant = Variant(bias(True, True, True, True, half=True), head_dim=64, layout="packed", longest=264)
    case = replace(variant.case(0, "cpu", (136, 264)), constant=("bias",))
    assert case.arguments["bias"].shape == (4, 2, 264, 264)
    results = results_of(case)
    assert [str(x) for x in compare(results, case, solve(case)) if not x.ok] == []


class Bug(NamedTuple):
    """A mistake, and a problem that shows it."""

    name: str
    file: str  # below `backend/hopper/kernels`
    old: str
    new: str
    problem: str


TILES, COPY = "shared/bias_tiles.py", "align_rows.py"
BUGS = (
    Bug("first sequence's bias", TILES, "(sequence, of_head, row, key)", "(0, of_head, row, key)", "of sequences 64"),
    Bug("first head's bias", TILES, "(sequence, of_head, row, key)", "(sequence, 0, row, key)", "one bias 64"),
    Bug("not transposed", TILES, "permute([1, 0])", "permute([0, 1])", "one bias 128"),
    Bug("tiles of one warpgroup", TILES, "WARPGROUPS + warpgroup\n    mbarrier.wait(tiles.full",
        "WARPGROUPS\n    mbarrier.wait(tiles.full", "one bias 64"),
    Bug("loaded before it was read", TILES, "(wraps_of(count, STAGES) & 1) ^ 1)", "wraps_of(count, STAGES) & 1)",
        "one bias 64"),
    Bug("read after the last step", "backward/mainloop.py", "steps_left > 1, warpgroup", "True, warpgroup",
        "one bias 64"),
    Bug("first sequence's rows copied", COPY, "flat_head // num_heads * stride64", "0 * stride64",
        "unaligned rows of sequences 32"),
    Bug("rows copied without space between", COPY, "+ row) * pitch", "+ row) * keys", "unaligned rows of one bias 64"),
    Bug("previous block's bias", "forward/producer.py", "tile, next_key, count, CONFIG)\n            first_key",
        "tile, first_key, count, CONFIG)\n            first_key", "one bias 64"),
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"bias_bug{BUGS.index(bug)}"
    copy_with_mistake(folder, f"kernels/{bug.file}", bug.name, bug.old, bug.new)
    try:
        assert wrong(PROBLEMS[bug.problem], folder)
    except EmulationError:
        return
