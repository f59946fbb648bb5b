"""Comparisons as a table and as a picture: losses first, and marked."""

from collections.abc import Callable, Sequence

from ..bench.results import three_digits
from .section import Plot, Series, Table
from .verdict import ADJECTIVES, Comparison, Verdict, by_group, losses_first

MIB = 2**20
IN_WORDS: dict[str, Callable[[float], str]] = {
    "speed": lambda seconds: f"{three_digits(seconds * 1e3)} ms",
    "memory": lambda count: f"{three_digits(count / MIB)} MiB",
    "error": lambda error: f"{error:.1e}",
}
COLORS = {Verdict.WORSE: "bad", Verdict.EQUAL: "muted", Verdict.BETTER: "good"}


def table_of(comparisons: Sequence[Comparison], caption: str = "", folded: str = "") -> Table:
    """A row for each comparison, the worst first."""
    ranked = losses_first(comparisons)
    rows = [
        (
            x.case,
            x.word,
            x.times,
            IN_WORDS[x.question](x.own),
            f"{IN_WORDS[x.question](x.other)}, {x.peer}",
            "" if x.low is None or x.high is None else f"{x.low:.2f} to {x.high:.2f}",
        )
        for x in ranked
    ]
    columns = ["case", "flashtile is", "it has", "flashtile", "best other", "20–80% of rounds"]
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    lost = frozenset(n for n, x in enumerate(ranked) if x.verdict is Verdict.WORSE)
    return Table(tuple(columns), rows, frozenset({3, 5}), caption, folded, lost)


def plot_of(comparisons: Sequence[Comparison], name: str, title: str, label: str, caption: str) -> Plot:
    """A row for each group, a mark for each case. Worse cases are left of 1 and have their own color."""
    groups = list(by_group(comparisons))
    series = []
    for verdict, words in zip(Verdict, ADJECTIVES[comparisons[0].question], strict=True):
        some = [x for x in comparisons if x.verdict is verdict and 0 < x.ratio < float("inf")]
        if some:
            rows = [float(groups.index(x.group)) for x in some]
            series.append(Series(words, [x.ratio for x in some], rows, color=COLORS[verdict]))
    return Plot(name, title, series, label, kind="dots", rows=tuple(groups), mark=1.0, caption=caption)
