"""The oracle and its bounds notice every bug in `seeded_bugs` and `seeded_cpu_bugs`, and raise no false alarm."""

import pytest
from seeded_bugs import BUGS, Bug, caught_by, planted
from seeded_cpu_bugs import CPU_BUGS, CpuBug, caught


def test_nothing_is_caught_without_a_bug() -> None:
    assert caught_by() is None


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug) -> None:
    with planted(bug):
        assert caught_by(module=bug.module) is not None
    assert caught_by(num_calls=1) is None  # and it is gone again


def test_cpu_kernels_are_right_without_a_bug() -> None:
    checks = {x.check: x for x in CPU_BUGS if x.is_usable}
    assert not [wrong for x in checks.values() if (wrong := x.run()) is not None]


@pytest.mark.parametrize("bug", CPU_BUGS, ids=[x.bug.name for x in CPU_BUGS])
def test_bug_in_cpu_kernels_is_caught(bug: CpuBug) -> None:
    if not bug.is_usable:
        pytest.skip(f"this processor has no {bug.width}")
    assert caught(bug) is not None
