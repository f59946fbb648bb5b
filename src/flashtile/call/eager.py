"""Plain eager calls: no mode, trace, profiler, functorch level or tensor subclass around them."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import private_torch
from . import sharding

PLAIN = (Tensor, Parameter)
Function = TypeVar("Function", bound=Callable[..., Any])


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
        private_torch.forward_level() >= 0
        or private_torch.maybe_current_level() is not None
        or private_torch.len_torch_dispatch_stack() > 0
        or (private_torch.len_torch_function_stack() > 0 and not only_default_devices())
        or private_torch.get_tracing_state() is not None
        or private_torch.profiler_enabled()
    ):
        return False
    for x in tensors:  # noqa: SIM110 - a generator takes longer
        if x is not None and (type(x) not in PLAIN or x.is_neg()):
            return False
    return True


def public_call(function: Function) -> Function:
    """Hand calls of a public function that ranks share to `flashtile.distributed`, and take modes that only set a
    default device off the others. The function names every device itself, and such modes cost each operation and each
    property of a tensor a call in Python, three times the function's own.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if sharding.contexts_open or (
            (not args or type(args[0]) not in PLAIN) and not torch.compiler.is_compiling()  # a DTensor, perhaps
        ):
            results = NotImplemented
            if torch.compiler.is_compiling():
                results = sharding.run_traced(function.__name__, args, kwargs)
            if results is NotImplemented:
                results = sharding.run_sharded(function, args, kwargs)
            if results is not NotImplemented:
                return results
        if torch.compiler.is_compiling() or private_torch.len_torch_function_stack() == 0 or not only_default_devices():
            return function(*args, **kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        switched_off = private_torch.DisableTorchFunction
        if switched_off is None or any(type(x) not in PLAIN for x in tensors):  # which may have a function of their own
            return function(*args, **kwargs)
        with switched_off():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def only_default_devices() -> bool:
    """Whether all active modes come from `torch.set_default_device` or `with torch.device(...)`. They change functions
    without a `device` argument only, which no call uses.
    """
    modes = map(private_torch.get_function_stack_at, range(private_torch.len_torch_function_stack()))
    return all(type(mode) is private_torch.DeviceContext for mode in modes)
