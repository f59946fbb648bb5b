"""Planted bugs find their place by syntax."""

import pytest
from mistakes import with_mistake

SOURCE = """
def f(x, y):
    total = g(
        x + 1,  # the first
        y,
    )
    return total if x else -total
"""


@pytest.mark.parametrize("old", ["g(x + 1, y)", "g(x+1,y)", "g(\n    x + 1, y\n)"])
def test_line_breaks_blanks_and_comments_do_not_count(old: str) -> None:
    assert "    total = h(x)\n" in with_mistake(SOURCE, "", old, "h(x)")


def test_white_space_around_the_place_stays() -> None:
    changed = with_mistake(SOURCE, "", "\n    return total", "\n    x = 0\n    return total")
    assert changed.endswith(")\n    x = 0\n    return total if x else -total\n")


@pytest.mark.parametrize("old", ["g(x, y)", "total", "tota", "otal = g", "x + 1, # the second"])
def test_the_place_is_the_only_one(old: str) -> None:
    with pytest.raises(AssertionError, match="the source has moved on"):
        with_mistake(SOURCE, "a bug", old, "")
