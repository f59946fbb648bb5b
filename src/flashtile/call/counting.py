"""Counts of passes by function, backend and reason inside of `with flashtile.calls()`; nothing is counted elsewhere."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..locks import process_lock


class CallCount(NamedTuple):
    """One row of `flashtile.calls()`.

    Attributes:
        function: the public function; for a call of PyTorch's that `flashtile.compat.torch.activate` has taken, its
            operator.
        direction: "forward", "backward", "tangents" of a forward pass in forward mode, or "second" of a second
            derivative.
        backend: the backend that ran, or "PyTorch" for a call that was left to it.
        why: why this one: the reason that each backend before it declined or that it is slower, or who named it; empty
            for the first of all.
        calls: how often.
    """

    function: str
    direction: str
    backend: str
    why: tuple[str, ...]
    calls: int

    def __str__(self) -> str:
        return "\n  ".join((f"{self.calls} x {self.function}, {self.direction}: {self.backend}", *self.why))


class CallCounts:
    """What ran since `with flashtile.calls()` began, also after its end. `str(counts)` is a table for people.

    Attributes:
        rows: a `CallCount` for each function, direction, backend and reason, in the order of their first calls.
        total: forward calls that flashtile ran.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str, tuple[str, ...]], int] = {}

    @property
    def rows(self) -> tuple[CallCount, ...]:
        with _lock:
            return tuple(CallCount(*key, calls) for key, calls in self._counts.items())

    @property
    def total(self) -> int:
        return sum(row.calls for row in self.rows if row.direction != "backward" and row.backend != PYTORCH)

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows)) or "no calls of flashtile"

    __repr__ = __str__


PYTORCH = "PyTorch"
opened: tuple[CallCounts, ...] = ()  # counts of all threads
_lock = process_lock()
_operator = threading.local()  # PyTorch's operator, in whose place a call runs


_always: tuple[CallCounts, ...] = ()


def open_always() -> None:
    """Let calls take the way on which they are seen, in this process and in those that it forks."""
    global opened, _always
    _always = (CallCounts(),)
    opened = (*opened, *_always)


def _after_fork() -> None:
    """A forked process counts nothing."""
    global opened
    opened = _always


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def calls() -> Iterator[CallCounts]:
    """Count the calls of flashtile inside of a `with` block, in all threads: whether it is used, by which backend, why.

    Every call counts that runs here, whoever made it: transformers, diffusers, the names of other libraries, PyTorch's
    functions while `flashtile.compat.torch.activate` holds, and compiled functions, whose calls count when they run and
    not when they are traced. A CUDA graph counts when it is captured, a sharded call for each of its parts. Operations
    of second derivatives do not count. Calls take some microseconds more meanwhile.

    Example:
        >>> q, k, v = (torch.randn(1, 8, 256, 64) for _ in range(3))
        >>> with flashtile.calls() as counts:
        ...     out = flashtile.attention(q, k, v, causal=True)
        >>> counts.total, counts.rows[0].backend
        (1, 'cpu')

    Returns:
        A context manager that gives a `CallCounts`. Blocks may be nested, and each begins with 0.
    """
    global opened
    counts = CallCounts()
    with _lock:
        opened = (*opened, counts)
    try:
        yield counts
    finally:
        with _lock:
            opened = tuple(x for x in opened if x is not counts)


@contextmanager
def in_place_of(operator: str) -> Iterator[None]:
    """Count the calls of this thread inside of a `with` block as an operator of PyTorch."""
    outer = getattr(_operator, "name", None)
    _operator.name = operator
    try:
        yield
    finally:
        _operator.name = outer


def add(function: str, direction: str, backend: str, why: tuple[str, ...]) -> None:
    """Add a pass that has run to the open counts."""
    key = (getattr(_operator, "name", None) or function, direction, backend, why)
    with _lock:
        for counts in opened:
            counts._counts[key] = counts._counts.get(key, 0) + 1
