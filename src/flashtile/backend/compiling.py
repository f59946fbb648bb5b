"""The compilation of one kernel: a line on stderr where it takes long, and a count. CPU and GPU kernels share this."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PATIENCE = 2.0  # seconds until there is a line
compiled = 0  # kernels of this process


class NotCompiledError(Exception):
    """A kernel is in no cache, where none may be compiled."""


class State(threading.local):
    """The state of a thread."""

    inside = False  # it compiles; parts of a kernel are compiled inside of it
    refuses = False
    others: Callable[[], Iterable[Any]] = tuple  # kernels of later passes


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
def within() -> Iterator[None]:
    """Around the compilation of a part in this thread, for a kernel that another thread may compile."""
    before, _state.inside = _state.inside, True
    try:
        yield
    finally:
        _state.inside = before


@contextlib.contextmanager
def expecting(others: Callable[[], Iterable[Any]]) -> Iterator[None]:
    """Inside, a kernel of this thread that has to be compiled may be compiled at the same time as those that `others`
    returns, which later passes need.
    """
    before, _state.others = _state.others, others
    try:
        yield
    finally:
        _state.others = before


def expected() -> Iterable[Any]:
    """The kernels that `expecting` has named: once."""
    others, _state.others = _state.others, tuple
    return others()


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
