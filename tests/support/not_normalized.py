"""Calls whose arguments nobody looks at."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock


@contextmanager
def not_normalized() -> Iterator[None]:
    """A call that looks at its arguments is an error."""
    with ExitStack() as stack:
        for module in ("attention", "varlen", "kvcache"):
            error = AssertionError("looked at")
            stack.enter_context(mock.patch(f"flashtile.api.{module}.normalize", side_effect=error))
        yield
