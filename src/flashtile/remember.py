"""Dictionaries of what was worked out once, which forget their oldest entry when they are full."""

from collections.abc import Hashable
from typing import Any


def remember(known: dict[Any, Any], key: Hashable, value: Any, most: int) -> Any:
    """Keep `value` among at most `most` entries, and return it."""
    if len(known) >= most:
        known.pop(next(iter(known)), None)  # another thread may have been quicker
    known[key] = value
    return value
