"""The oracle and its bounds notice every mistake in `seeded_bugs`, and no mistake where there is none."""

import pytest
from seeded_bugs import BUGS, Bug, caught_by, planted


def test_nothing_is_caught_without_a_bug() -> None:
    assert caught_by() is None


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_bug_is_caught(bug: Bug) -> None:
    with planted(bug):
        assert caught_by() is not None
    assert caught_by(num_calls=1) is None  # and it is gone again
