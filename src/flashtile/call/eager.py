"""Plain eager calls: no mode, trace, profiler, functorch level or tensor subclass around them."""

from typing import Any

from torch import Tensor
from torch.nn import Parameter

from .. import private_torch

PLAIN = (Tensor, Parameter)


@private_torch.constant_result
def has_own_functions(kind: Any) -> bool:
    """Whether a class of tensors has torch functions of its own, but no operators: what a tensor means to those
    functions may not be in its memory, which operators read. The elements of PyTorch's `CausalBias` are never written.
    """
    base: Any = Tensor
    if kind in PLAIN or kind.__torch_dispatch__ != base.__torch_dispatch__:
        return False
    return getattr(kind.__torch_function__, "__func__", None) not in (None, base.__torch_function__.__func__)


def in_forward_mode() -> bool:
    """Whether a forward-mode level is open: an operator would drop the tangent of a dual tensor without a word. Under
    nested transforms the dual may be hidden inside a wrapper, so an open level is enough.
    """
    return private_torch.forward_level() >= 0


def is_plain_eager(*tensors: Tensor | None) -> bool:
    """Whether no mode, trace, profiler, functorch level or tensor subclass observes an eager call with these tensors.
    Such calls bypass the dispatcher, which takes longer than all else that the host does.
    """
    if (
        is_observed_without_key()
        or private_torch.maybe_current_level() is not None
        or private_torch.get_tracing_state() is not None
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator takes longer
        if x is not None and (type(x) not in PLAIN or x.is_neg()):
            return False
    return True


def is_observed_without_key() -> bool:
    """Whether something observes an eager call that no dispatch key shows, so that a guard of tensors
    (`call.memory.Layouts`) does not see it. Traces and functorch levels have keys, dispatch modes all but PyTorch's own
    for fake tensors and `make_fx`.
    """
    return (
        private_torch.forward_level() >= 0
        or private_torch.len_torch_dispatch_stack() > 0
        or private_torch.profiler_enabled()
        or (private_torch.len_torch_function_stack() > 0 and not only_default_devices())
    )


def only_default_devices() -> bool:
    """Whether all active modes come from `torch.set_default_device` or `with torch.device(...)`. They change functions
    without a `device` argument only, which no call uses.
    """
    modes = map(private_torch.get_function_stack_at, range(private_torch.len_torch_function_stack()))
    return all(type(mode) is private_torch.DeviceContext for mode in modes)
