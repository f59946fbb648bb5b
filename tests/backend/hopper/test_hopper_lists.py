"""Lists of the blocks that a mask function shows, in the Hopper kernels without a GPU: emulated, with planted bugs."""

import importlib
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")

import seeded_bugs
from checking import dense_case
from gluon_emulation.backend import FOLDER, emulated, emulated_kernels
from gluon_emulation.machine import EmulationError
from hopper_score_mods import decay, with_score_mod

from flashtile.testing.case import Case, MaskFunction
from flashtile.testing.oracle import solve
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.repeat_interleave(torch.tensor([3, 8, 9, 4]), torch.tensor([130, 71, 180, 219]))


def documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor, ids: Tensor) -> Tensor:
    return ids[i] == ids[j]


def earlier(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def far_by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor, width: Tensor) -> Tensor:
    """Rows from 230 on see no key, and keys from 250 on are seen by no row. Heads of a group differ."""
    return (i < 230) & (j < 250) & ((i - j).abs() >= width[h])


def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i - j).abs() <= 140) & ((i - j).abs() % 5 == b)


class Problem(NamedTuple):
    """A call with a mask function."""

    mask: MaskFunction
    head_dim: int
    seqlen_q: int
    seqlen_k: int
    heads: tuple[int, int] = (2, 2)
    deterministic: bool = False
    score_mod: Any = None


BY_HEAD = MaskFunction(far_by_head, (torch.tensor([0, 100, 220, 30]),))
PROBLEMS = {
    "documents 64": Problem(MaskFunction(documents, (IDS,)), 64, 513, 513),
    "documents 128": Problem(MaskFunction(documents, (IDS,)), 128, 330, 400),
    "earlier 96": Problem(MaskFunction(earlier), 96, 300, 333),
    "heads of groups 64": Problem(BY_HEAD, 64, 385, 401, (4, 2)),
    "heads of groups 128": Problem(BY_HEAD, 128, 270, 401, (4, 2), deterministic=True),
    "dilated, decay 64": Problem(MaskFunction(dilated), 64, 513, 300, score_mod=decay),
}
UNSEEN = 256  # the first key of the blocks that no row sees in problems of BY_HEAD


def case_of(problem: Problem) -> Case:
    heads_q, heads_k = problem.heads
    case = dense_case(
        num_heads_q=heads_q, num_heads_kv=heads_k, seqlen_q=problem.seqlen_q, seqlen_k=problem.seqlen_k,
        head_dim=problem.head_dim, dtype=torch.bfloat16,
    )  # fmt: skip
    if problem.score_mod is not None:
        case = with_score_mod(problem.score_mod, case, 0, "cpu")
    return replace(case, arguments=case.arguments | {"mask": problem.mask}, description="")


def run(case: Case, problem: Problem, folder: Path = FOLDER) -> dict[str, Tensor]:
    """Results with lists of blocks."""
    package = str(emulated_kernels(folder).__package__)
    lists = importlib.import_module(f"{package}.block_lists")
    cores = 1 if problem.deterministic else 3  # one program waits forever for what it takes later
    with mock.patch.object(lists, "LEAST_PAIRS", 0), emulated(cores, 0, folder), poisoned_allocation():
        return case.run("hopper", deterministic=problem.deterministic)


def wrong(name: str, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds. Keys in blocks that no row sees are NaN."""
    problem = PROBLEMS[name]
    case = case_of(problem)
    solution = solve(case)
    if problem.mask is BY_HEAD:
        for x in ("k", "v"):
            poisoned = case.arguments[x].clone()
            poisoned[:, :, UNSEEN:] = torch.nan
            case = replace(case, arguments=case.arguments | {x: poisoned})
    return [str(x) for x in compare(run(case, problem, folder), case, solution) if not x.ok]


@pytest.mark.parametrize("name", PROBLEMS)
def test_within_the_bound(name: str) -> None:
    assert wrong(name) == []


class Bug(NamedTuple):
    """A mistake, and a problem that shows it."""

    name: str
    file: str  # below `backend/hopper`
    old: str
    new: str
    problem: str


LISTS, SHARED, WRITER = "block_lists.py", "kernels/shared/block_lists.py", "kernels/backward/dq_writer.py"
PRODUCER = "kernels/forward/producer.py"
BUGS = (
    Bug("last entry forgotten", SHARED, "return offset, gl.load(lists.data + offset)",
        "return offset, gl.maximum(gl.load(lists.data + offset) - 1, 1)", "earlier 96"),
    Bug("partial blocks taken for full ones", SHARED, "((entry & 1) != 0,)", "((entry & 1) > 1,)", "documents 64"),
    Bug("producer one entry behind", PRODUCER, "tile.hi - 2 - n)", "tile.hi - 1 - n)", "documents 64"),
    Bug("an empty list without a block", LISTS, "lists[..., 0] += empty", "lists[..., 0] += 0", "heads of groups 64"),
    Bug("heads of a group hide", LISTS, "low == high, low, PARTIAL", "low == high, low, HIDDEN", "heads of groups 64"),
    Bug("ranks in the other order", LISTS, "if first_key_first", "if not first_key_first", "heads of groups 128"),
    Bug("ranks of blocks", WRITER, "position = listed_rank", "position = position", "heads of groups 128"),
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"lists_bug{BUGS.index(bug)}"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / bug.file
    file.write_text(seeded_bugs.with_mistake(file.read_text(), bug.name, bug.old, bug.new))
    try:
        assert wrong(bug.problem, folder)
    except EmulationError:
        return
