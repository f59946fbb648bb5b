"""Functions that Dynamo leaves alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .private_torch import skip_frames

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Mark a function as one that Dynamo leaves alone, with all that it calls: after a graph break it would trace what
    an operator does, and break on each launch. As `torch.compiler.disable`, which costs each call a microsecond, and
    the first one the import of Dynamo.
    """
    if not skip_frames(function.__code__):
        return torch.compiler.disable(function)  # type: ignore[return-value]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for calls in a traced frame
    return function
