"""The compilation of one kernel: a line on stderr where it takes long, and a count. CPU and GPU kernels share this."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = 2.0  # seconds until there is a line
compiled = 0  # kernels of this process


class NotCompiledError(Exception):
    """A kernel is in no cache, where none may be compiled."""


class State(threading.local):
    """The state of a thread."""

    inside = False  # it compiles; parts of a kernel are compiled inside of it
    refuses = False


_state = State()


@contextlib.contextmanager
def compiling(cached_in: Callable[[], Any]) -> Iterator[None]:
    """Around the compilation of a kernel, into the folder `cached_in()`.

    Raises:
        NotCompiledError: inside of `none_compiled`.
    """
    global compiled
    if _state.refuses:
        raise NotCompiledError
    if _state.inside:
        yield
        return
    timer = threading.Timer(PATIENCE, tell, (cached_in,))
    timer.daemon = True
    timer.start()
    _state.inside = True
    try:
        yield
        compiled += 1
    finally:
        _state.inside = False
        timer.cancel()


@contextlib.contextmanager
def none_compiled() -> Iterator[None]:
    """Inside, this thread finds kernels in caches alone."""
    _state.refuses = True
    try:
        yield
    finally:
        _state.refuses = False


def tell(cached_in: Callable[[], Any]) -> None:
    try:
        place = f", once; cached in {cached_in()}"
    except OSError:  # there is no cache
        place = ""
    sys.stderr.write(f"flashtile: compiling a kernel{place}\n")
