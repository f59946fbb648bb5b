"""score_mod and mask functions in the Hopper kernels without a GPU: emulated, with planted bugs."""

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import seeded_bugs
from gluon_emulation.backend import FOLDER, copy_with_mistake, emulated
from gluon_emulation.machine import EmulationError
from hopper_score_mods import MASK_VARIANTS, PROBLEMS, expected, mask_case, score_mod_case

from flashtile.testing.case import Case, ScoreFunction
from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
AROUND_TILES = (33, 65, 129, 130)
FAR = (321, 450)


def case_of(problem: str, lengths: tuple[int, ...] = AROUND_TILES) -> Case:
    return (score_mod_case if problem in PROBLEMS else mask_case)(problem, sum(problem.encode()), "cpu", lengths)


def wrong(case: Case, folder: Path = FOLDER) -> list[str]:
    """Results outside of their error bounds."""
    with emulated(3, 0, folder) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert any(name.endswith(("backward_kernel", "dkdv_kernel")) for name in launched) != case.forward_only
    return [f"{case.description}\n  {x}" for x in compare(results, case, expected(case)) if not x.ok]


@pytest.mark.parametrize("problem", [*PROBLEMS, *MASK_VARIANTS])
def test_random_problems_are_within_the_bound(problem: str) -> None:
    assert wrong(case_of(problem)) == []


@pytest.mark.parametrize(
    "problem", ["decay, full 128", "distance_table, causal 64", "relative_position, packed everything 64",
                "causal, full 64", "distances, decay 256", "near_buckets, full 64"],
)  # fmt: skip
def test_blocks_far_from_the_diagonal(problem: str) -> None:
    """On both sides of it."""
    assert wrong(case_of(problem, FAR)) == []


@pytest.mark.parametrize("width", [64, 256])  # of one kernel for all gradients, or one for dq
def test_a_row_of_minus_infinity_alone_passes_no_gradient(width: int) -> None:
    """Not 0 times the infinite derivative of a score_mod."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 1, 130, width, generator=generator).bfloat16() for _ in range(4))
    bias = torch.where(torch.arange(130)[:, None] == 1, -torch.inf, torch.zeros(130, 130))[None, None]
    square = ScoreFunction(lambda score, b, h, i, j: -0.5 * score.square())
    arguments = {"q": q, "k": k, "v": v, "bias": bias, "score_mod": square}
    assert wrong(Case("attention", arguments, dout, constant=("bias",))) == []


class Bug(NamedTuple):
    """A mistake in device functions of formulas, or in a kernel that calls them, and a problem that shows it."""

    name: str
    file: str  # below `backend`
    old: str
    new: str
    problem: str
    lengths: tuple[int, ...] = (65, 130)


STAGED, FORMULAS, FUNCTIONS = "gpu/staged.py", "hopper/launch/formulas.py", "hopper/kernels/shared/functions.py"
SHARED, MAINLOOP = "hopper/kernels/shared", "hopper/kernels/forward/mainloop.py"
TABLE = "hopper/kernels/distance_table.py"
KEY_ORDER = "hopper/kernels/forward/key_order.py"
BUGS = (
    Bug("negative factors in the softmax", MAINLOOP, "factor > SMALLEST_FACTOR", "factor != 0", "signed, full 128"),
    Bug("elements of the first head", f"{SHARED}/score_mod.py", "SCORE_MOD.head(sequence_index(params, b), head + ",
        "SCORE_MOD.head(sequence_index(params, b), ", "signed, full 128"),
    Bug("scale after a term", FORMULAS, " and is_homogeneous(formula)", "", "relative_position, full 64"),
    Bug("distances of the first block", f"{SHARED}/distances.py", "first + base + constant * 0",
        "base + constant * 0", "decay, full 128"),
    Bug("mask function ignored", STAGED, "self.where(visible, score, self.constant(-math.inf, REAL))", "score",
        "causal by head 64"),
    Bug("derivative of hidden pairs", STAGED, 'x if x.inputs <= {"b", "h"} else self', "x if True else self",
        "causal by head, undefined 64"),
    Bug("block on the diagonal taken for one before it", f"{SHARED}/score_mod.py", "if least >=", "if most >=",
        "distance_table, causal 64", FAR),
    Bug("other side of the diagonal", f"{SHARED}/score_mod.py", "score_mod.before, score_mod.after",
        "score_mod.after, score_mod.before", "distance_table, causal 64", FAR),
    Bug("sign of a scaled distance", STAGED, "(real_distance, {sign}{", "(real_distance, {", "decay, full 128", FAR),
    Bug("last blocks not visited", KEY_ORDER, "block + (tile.hi - tile.lo)", "tile.lo", "decay, full 128", FAR),
    Bug("table of other distances", TABLE, "gl.maximum(n - reach, 0)", "gl.maximum(n - reach - 1, 0)",
        "near_buckets, full 64"),
    Bug("table of the first head", TABLE, "function(0.0, 0, h,", "function(0.0, 0, h * 0,", "near_buckets, full 64"),
    Bug("run past the tensor's end", FUNCTIONS, "run.stop <= size", "run.stop > 0", "documents, full 128"),
)  # fmt: skip


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug, tmp_path: Path) -> None:
    folder = tmp_path / f"formula_bug{BUGS.index(bug)}"
    planted = nullcontext()
    if bug.file == STAGED:
        planted = seeded_bugs.planted(seeded_bugs.Bug(bug.name, "backend.gpu.staged", bug.old, bug.new))
    file = None if bug.file == STAGED else bug.file.removeprefix("hopper/")
    copy_with_mistake(folder, file, bug.name, bug.old, bug.new)
    with planted:
        try:
            assert wrong(case_of(bug.problem, bug.lengths), folder)
        except EmulationError:
            return
