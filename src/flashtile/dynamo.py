"""Functions that Dynamo leaves alone."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Mark a function as one that Dynamo leaves alone, with all that it calls: after a graph break it would trace what
    an operator does, and break on each launch. As `torch.compiler.disable`, which costs each call a microsecond, and
    the first one the import of Dynamo.
    """
    eval_frame.set_code_exec_strategy(function.__code__, SKIPPED)  # for frames
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # for calls in a traced frame
    return function
