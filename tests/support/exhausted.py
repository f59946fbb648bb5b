"""Memory that runs out at one allocation of a call."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor

from flashtile.testing.poison import ALLOCATORS

FILLED = ((torch, ("zeros", "zeros_like", "full")), (Tensor, ("new_zeros", "contiguous", "clone")))


@contextmanager
def exhausted(number: int) -> Iterator[None]:
    """Let allocation `number` of Python code inside this block fail, counted from 0."""
    left = itertools.count(number, -1)

    def failing(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @wraps(allocate)
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            if next(left) == 0:
                raise torch.OutOfMemoryError("no memory")
            return allocate(*args, **kwargs)

        return allocated

    with pytest.MonkeyPatch.context() as patch:
        for owner, names in (*ALLOCATORS, *FILLED):
            for name in names:
                if hasattr(owner, name):
                    patch.setattr(owner, name, failing(getattr(owner, name)))
        yield


def runs_out_of_memory(call: Callable[[], Any], check: Callable[[], None]) -> int:
    """Let each allocation of a call fail in a run of its own, followed by `check`; return the number of allocations."""
    for number in itertools.count():
        try:
            with exhausted(number):
                call()
        except torch.OutOfMemoryError:
            check()
        else:
            return number
    raise AssertionError
