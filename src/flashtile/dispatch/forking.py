"""Forked processes, which do not have the threads of their parent: an OpenMP region would wait for them for ever.

PyTorch's own operations wait there. DataLoader sets one thread in its workers; here a call does it for itself.
"""

import functools
import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import AttentionWarning

forked = False  # whether this process is one


def _after_fork() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class OneThread(AbstractContextManager[None]):
    """`inside`, with PyTorch on one thread."""

    def __init__(self, inside: AbstractContextManager[None]):
        self.inside = inside

    def __enter__(self) -> None:
        self.threads = torch.get_num_threads()
        if self.threads > 1:
            warn_once()
            torch.set_num_threads(1)
        self.inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inside.__exit__(*error)
        if self.threads > 1:
            torch.set_num_threads(self.threads)


@functools.cache
def warn_once() -> None:
    warnings.warn(
        "attention runs on one thread in a forked process, whose OpenMP threads stayed in its parent, and operations "
        "of PyTorch itself may wait for them for ever: call torch.set_num_threads(1) there, or start processes by "
        "spawn (torch.multiprocessing.get_context('spawn'), DataLoader(multiprocessing_context='spawn'))",
        AttentionWarning,
        stacklevel=2,
    )
