"""The rows of a benchmark as a CSV file."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def write(path: Path, fields: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Replace a file by a line of `fields` and one of each row."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
