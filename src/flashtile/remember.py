"""Bounded caches: plain dictionaries that drop their oldest entry when they are full."""

from collections.abc import Hashable
from typing import Any


def remember(known: dict[Any, Any], key: Hashable, value: Any, most: int) -> Any:
    """Keep `value` among at most `most` entries, one more for each other thread that is here, and return it.

    There is no lock: a process forked while another thread holds one would wait for it forever.
    """
    while len(known) >= most:
        try:
            known.pop(next(iter(known)), None)
        except (RuntimeError, StopIteration):  # another thread was quicker: look again
            continue
    known[key] = value
    return value
