"""The rule that decides whether a figure of flashtile is better or worse than another library's.

Every count, word, color and order on the page comes from `Comparison.verdict`, so that text and tables agree.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

MARGIN = 0.97  # a ratio from here on is not worse


class Verdict(Enum):
    WORSE, EQUAL, BETTER = range(3)


# Each question with its adjectives for WORSE, EQUAL and BETTER.
ADJECTIVES = {
    "speed": ("slower", "as fast", "faster"),
    "memory": ("larger", "as small", "smaller"),
    "error": ("less exact", "as exact", "more exact"),
}
RULE = (
    "One rule for every verdict on this page: flashtile is compared with the best of the others, that is the fastest, "
    f"the smallest or the most exact. Below {MARGIN:g} times its speed or above {1 / MARGIN:.2f} times its memory or "
    f"error counts as worse; above {1 / MARGIN:.2f} times its speed or below {MARGIN:g} times its memory or error as "
    "better; between as equal. Of speed, the median of the rounds counts."
)


@dataclass(frozen=True)
class Comparison:
    """A figure of flashtile and of the best other, in seconds, bytes or as a relative error."""

    question: str  # a key of ADJECTIVES
    group: str  # cases of a kind, which share a row of a picture
    case: str
    own: float
    other: float
    peer: str  # display name of the other library
    ratio: float  # how many times as good as the other: above 1 is better
    low: float | None = None  # 20% and 80% of the rounds, where there are several
    high: float | None = None

    @property
    def verdict(self) -> Verdict:
        if self.ratio < MARGIN:
            return Verdict.WORSE
        return Verdict.BETTER if self.ratio > 1 / MARGIN else Verdict.EQUAL

    @property
    def word(self) -> str:
        return ADJECTIVES[self.question][self.verdict.value]

    @property
    def times(self) -> str:
        """The ratio in words: "0.21 times the speed", "8.00 times the memory"."""
        x = self.ratio if self.question == "speed" else 1 / self.ratio if self.ratio else float("inf")
        return f"{figures(x)} times the {self.question}"

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.word}


def figures(x: float) -> str:
    """Format with two decimals, or more if rounding would cross a limit of the rule: 0.9699 is not 0.97."""
    if x >= 100:
        return f"{x:,.0f}"
    side = [x < limit for limit in (MARGIN, 1 / MARGIN)]
    for digits in range(2, 8):
        text = f"{x:.{digits}f}"
        if [float(text) < limit for limit in (MARGIN, 1 / MARGIN)] == side:
            return text
    return repr(x)


def times_as_small(own: float, other: float) -> float:
    """Ratio of two figures, where smaller is better; two zeros are equal."""
    if own == other:
        return 1.0
    return other / own if own else float("inf")


def losses_first(comparisons: Iterable[Comparison]) -> list[Comparison]:
    return sorted(comparisons, key=lambda x: x.ratio)


def worse(comparisons: Iterable[Comparison]) -> list[Comparison]:
    """The worse comparisons, the worst first."""
    return [x for x in losses_first(comparisons) if x.verdict is Verdict.WORSE]


def count(comparisons: Iterable[Comparison], verdict: Verdict) -> int:
    return sum(x.verdict is verdict for x in comparisons)


def tally(comparisons: Sequence[Comparison]) -> str:
    """Counts in words, losses first: "slower in 2 of 9, as fast in 1, faster in 6"."""
    words = ADJECTIVES[comparisons[0].question]
    parts = [f"{word} in {count(comparisons, verdict)}" for verdict, word in zip(Verdict, words, strict=True)]
    return ", ".join([f"{parts[0]} of {len(comparisons)}", *parts[1:]])


def by_group(comparisons: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Comparisons by group, in order of each group's first comparison."""
    groups: dict[str, list[Comparison]] = {}
    for x in comparisons:
        groups.setdefault(x.group, []).append(x)
    return groups


def answer(comparisons: Sequence[Comparison]) -> tuple[str, str]:
    """Answer to one question: a word, and a sentence on how often, where and how far flashtile is worse or better."""
    if not comparisons:
        return "Not measured", "Nothing could be compared."
    lost, won = count(comparisons, Verdict.WORSE), count(comparisons, Verdict.BETTER)
    short = "In part" if lost and won else "No" if lost else "Yes" if won else "Equal"
    ranked = losses_first(comparisons)
    sentences = [tally(comparisons).capitalize()]
    if lost:
        where = {name: (count(some, Verdict.WORSE), len(some)) for name, some in by_group(comparisons).items()}
        named = ", ".join(f"{name} {n} of {total}" for name, (n, total) in where.items() if n)
        sentences.append(f"{ranked[0].word.capitalize()}: {named}")
    sentences.append(f"{'Worst' if lost else 'Closest'}: {extreme(ranked[0])}")
    if len(ranked) > 1:
        sentences.append(f"Best: {extreme(ranked[-1])}")
    return short, ". ".join(sentences) + "."


def extreme(x: Comparison) -> str:
    """A comparison in words: "0.21 times the speed of plain PyTorch, backward 4"."""
    return f"{x.times} of {x.peer}, {x.case}"
