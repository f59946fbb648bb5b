"""Fixtures of the Hopper tests that ask for them by `usefixtures`."""

import faulthandler
from collections.abc import Iterator

import pytest

TIMEOUT = 300  # seconds for one test on a GPU, compilation included


@pytest.fixture
def watchdog() -> Iterator[None]:
    """The end of the process, with the stack printed, if a test takes too long: a barrier never signaled hangs."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
