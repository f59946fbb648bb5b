"""Who looks at a call, beside its kernels."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._dynamo import eval_frame
from torch._C._functorch import maybe_current_level
from torch.autograd import _profiler_enabled, forward_ad  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)
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


def in_forward_mode() -> bool:
    """Whether a forward-mode level is open: an operator would drop the tangent of a dual tensor without a word. Under
    nested transforms the dual may be hidden inside a wrapper, so an open level is enough.
    """
    return forward_ad._current_level >= 0


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Whether only an operator's kernels would look at a call with these tensors, if they are `in_memory`. PyTorch
    takes longer to find that out than a call does otherwise: operators are not asked for then.

    Modes, transforms, traces and profilers look at calls. And a tensor may be more than its memory: of a subclass, or
    to be negated.
    """
    if (
        forward_ad._current_level >= 0
        or maybe_current_level() is not None
        or _len_torch_dispatch_stack() > 0
        or _len_torch_function_stack() > 0
        or _get_tracing_state() is not None
        or _profiler_enabled()
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator takes longer
        if x is not None and (type(x) not in PLAIN or x.is_neg()):
            return False
    return True
