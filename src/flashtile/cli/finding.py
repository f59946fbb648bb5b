"""A finding of `flashtile doctor`."""

from typing import NamedTuple

OK, WARNING, BROKEN = "ok", "warning", "BROKEN"


class Finding(NamedTuple):
    """What a check found, and what to do about it."""

    check: str
    state: str
    words: str
    advice: str = ""
