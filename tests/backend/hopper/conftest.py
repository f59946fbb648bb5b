"""Fixtures of the Hopper tests that ask for them by `usefixtures`."""

import faulthandler
from collections.abc import Iterator

import pytest
import torch

TIMEOUT = 300  # seconds for one test on a GPU, compilation included


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread: the tensors are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def watchdog() -> Iterator[None]:
    """The end of the process, with the stack printed, if a test takes too long: a barrier never signaled hangs."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
