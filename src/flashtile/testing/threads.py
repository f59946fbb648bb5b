"""Threads of torch's operations."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread: for such small tensors as the oracle's, handing work to other threads takes longer than
    doing it, and there may be more of them than cores that a process may use.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
