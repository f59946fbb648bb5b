"""What a page is made of: sections with words, plots and tables, still without any markup."""

from dataclasses import dataclass, field
from typing import Any

from .verdict import Comparison


@dataclass(frozen=True)
class Table:
    """`numbers` are the columns with figures, which are aligned to the right; `marks` the rows with a loss, which the
    page colors. A table with `folded` words shows only these until the reader opens it.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: frozenset[int] = frozenset()
    caption: str = ""
    folded: str = ""
    marks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Series:
    """One line or one set of dots. Bands are the 20% and 80% quantiles, where there are any."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    dashed: bool = False
    color: str | None = None  # "bad", "muted" or "good" among dots; by default each series has its own


@dataclass(frozen=True)
class Plot:
    """`kind` is "lines" (x and y are numbers) or "dots" (y of a dot is a row, named in `rows`; x is a number)."""

    name: str  # of its file
    title: str
    series: list[Series]
    x_label: str
    kind: str = "lines"
    log_y: bool = False
    rows: tuple[str, ...] = ()
    mark: float | None = None  # a value of x that is worth a line, in dots
    caption: str = ""


@dataclass
class Section:
    """`records` are the figures behind it, for JSON and CSV; `ok` is False where something is wrong. `comparisons` are
    those that the first screen takes its answers from.
    """

    name: str
    title: str
    summary: str
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    ok: bool = True
    comparisons: list[Comparison] = field(default_factory=list)
