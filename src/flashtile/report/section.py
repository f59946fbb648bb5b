"""Parts of a page: sections with words, plots and tables, without markup."""

from dataclasses import dataclass, field
from typing import Any

from .verdict import Comparison


@dataclass(frozen=True)
class Table:
    """A table. `numbers` are the columns with figures, aligned to the right; `marks` are the rows with a loss.
    `folded` is the title of a table that is closed until the reader opens it.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numbers: frozenset[int] = frozenset()
    caption: str = ""
    folded: str = ""
    marks: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Series:
    """One line or one set of dots. `low` and `high` are the 20% and 80% quantiles."""

    name: str
    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    dashed: bool = False
    color: str | None = None  # "bad", "muted" or "good" among dots; by default each series has its own


@dataclass(frozen=True)
class Plot:
    """A plot: `kind` is "lines", or "dots" whose y is an index into `rows`."""

    name: str  # name of its file
    title: str
    series: list[Series]
    x_label: str
    kind: str = "lines"
    log_y: bool = False
    rows: tuple[str, ...] = ()
    mark: float | None = None  # x of a vertical line, in dots
    caption: str = ""


@dataclass
class Section:
    """A section of the page. `records` are its figures, for JSON and CSV; `ok` is False if something is wrong.
    `comparisons` are its part of the first screen.
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
