"""Room for frames. CPython maps its stack by pieces of 16 KB. Where the calls of a loop cross the end of a piece, it
maps and unmaps one for each of them: a fifth of the time of some tests.
"""

from collections.abc import Callable
from typing import Any


def with_room(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function behind a frame of 1 MB: the piece that holds it has as much for the frames of all calls below."""
    return function(*args, **kwargs)


with_room.__code__ = with_room.__code__.replace(co_stacksize=2**17)
