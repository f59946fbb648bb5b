"""Markdown for docs/*.py: stored rows, tables, paragraphs, and numbers in three figures."""

import csv
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a stored CSV file."""
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(header: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    columns = list(header)
    lines = [columns, ["---"] * len(columns), *body]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines).replace("| --- ", "|---")


def figure(value: Any) -> str:
    """Three figures of a number, and all of an integer; an empty cell for `None`."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value) if abs(value) < 10_000 else f"{value:,}"
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.3g}"
    if abs(value) < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{float(f'{value:.4g}'):,.0f}"


def listed(values: Iterable[Any]) -> str:
    """ "1, 2 and 3"."""
    words = [figure(x) for x in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def paragraph(*sentences: str, bullet: str = "") -> str:
    """Sentences as lines of the length that the pages have."""
    wrapper = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = bullet, " " * len(bullet)
    return wrapper.fill(" ".join(sentences))
