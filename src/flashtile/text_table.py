"""Tables of text for a terminal: columns aligned by spaces, as wide as their cells."""

from collections.abc import Iterable
from typing import NamedTuple


class TextTable(NamedTuple):
    """A heading above rows; columns whose number is in `right` are aligned to the right. Cells may be left out at the
    end of a row.
    """

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: frozenset[int] = frozenset()
    title: str = ""

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(self.header))]
        return "\n".join([*([self.title] if self.title else []), *(self.aligned(line, widths) for line in lines)])

    def aligned(self, cells: Iterable[str], widths: list[int]) -> str:
        padded = (
            cell.rjust(width) if i in self.right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
        )
        return "  ".join(padded).rstrip()
