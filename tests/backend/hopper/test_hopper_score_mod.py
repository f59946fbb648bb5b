"""score_mod and mask functions in the Hopper kernels without a GPU: emulated, and compiled."""

import pytest

pytest.importorskip("triton.experimental.gluon")

from gluon_emulation.backend import emulated
from hopper_score_mods import MASK_VARIANTS, PROBLEMS, expected, mask_case, score_mod_case

from flashtile.testing.poison import poisoned_allocation
from flashtile.testing.tolerance import compare

pytestmark = pytest.mark.usefixtures("one_thread")
AROUND_TILES = (33, 65, 129, 130)


@pytest.mark.parametrize("problem", [*PROBLEMS, *MASK_VARIANTS])
def test_random_problems_are_within_the_bound(problem: str) -> None:
    made = score_mod_case if problem in PROBLEMS else mask_case
    case = made(problem, sum(problem.encode()), "cpu", AROUND_TILES)
    with emulated(3, 0) as launched, poisoned_allocation():
        results = case.run("hopper")
    assert any(name in launched for name in ("backward_kernel", "dkdv_kernel")) != case.forward_only
    assert [f"{case.description}\n  {x}" for x in compare(results, case, expected(case)) if not x.ok] == []
