"""Who looks at a call, beside its kernels."""

from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._functorch import is_functorch_wrapped_tensor, maybe_current_level
from torch.autograd import _profiler_enabled, forward_ad  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import Parameter

PLAIN = (Tensor, Parameter)


def in_forward_mode() -> bool:
    """Whether a forward-mode level is open: an operator would drop the tangent of a dual tensor without a word. Under
    nested transforms the dual may be hidden inside a wrapper, so an open level is enough.
    """
    return forward_ad._current_level >= 0


def unobserved(*tensors: Tensor | None) -> bool:
    """Whether only an operator's kernels would look at a call with these tensors. PyTorch takes longer to find that out
    than a call does otherwise, so operators are not asked for then.

    Modes, transforms, traces and profilers look at calls; and a tensor may be more than its memory: of a subclass, a
    transform's wrapper, to be negated, all zeros, or without any.
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
    for x in tensors:
        if x is not None and (
            type(x) not in PLAIN or x.is_neg() or x.is_meta or x._is_zerotensor() or is_functorch_wrapped_tensor(x)
        ):
            return False
    return True
