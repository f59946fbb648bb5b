"""The public functions around their arguments: calls that ranks share, repeated calls, modes that only set a device."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from .. import private_torch
from ..call import sharding
from ..call.call import Call
from ..call.eager import PLAIN, only_default_devices
from ..dispatch.autograd import attend
from . import repeated
from .out import filled
from .outside_graph import breaks_graph, run_outside


class Request(NamedTuple):
    """The call that a public function's arguments are, and how its results are returned."""

    call: Call
    return_lse: bool
    out: Tensor | None  # the caller's
    direct: Tensor | None  # the same, if kernels may write into it
    run: Callable[[Any], tuple[Tensor, Tensor]] = attend


def public_call(function: Callable[..., Request]) -> Callable[..., Any]:
    """Make a public function from the function of its request. Calls that ranks share are handed to
    `flashtile.distributed`, and modes that only set a default device are taken off the others: the function names every
    device itself, and such modes cost each operation and each property of a tensor a call in Python, three times the
    function's own.
    """
    name, code = function.__name__, function.__code__
    positional = code.co_varnames[: code.co_argcount]
    function.__annotations__["return"] = "Tensor | tuple[Tensor, Tensor]"  # which `help` shows

    def result_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call, return_lse, out, direct, run = function(*args, **kwargs)
        result, lse = run(call)
        if out is not None:
            result = filled(out, direct, result)
        if not torch.compiler.is_compiling():
            repeated.remember_call(name, positional, args, kwargs, call, return_lse=return_lse)
        return (result, lse) if return_lse else result

    @functools.wraps(function)
    def public(*args: Any, **kwargs: Any) -> Any:
        compiling = torch.compiler.is_compiling()
        if compiling and breaks_graph(kwargs.get("score_mod"), kwargs.get("mask")):
            return run_outside(public, args, kwargs)
        modes = not compiling and private_torch.len_torch_function_stack() > 0
        if not compiling and not modes:
            result = repeated.run_repeated(name, args, kwargs)
            if result is not NotImplemented:
                return result
        if (not args or type(args[0]) not in PLAIN) and not compiling:
            proxies = [x for x in (*args, *kwargs.values()) if isinstance(x, Proxy)]
            if proxies:  # torch.fx.symbolic_trace, whose graph gets this function as one node
                return handle_torch_function(public, proxies, *args, **kwargs)
        if sharding.contexts_open or ((not args or type(args[0]) not in PLAIN) and not compiling):  # a DTensor, perhaps
            results = sharding.run_traced(name, args, kwargs) if compiling else NotImplemented
            if results is NotImplemented:
                results = sharding.run_sharded(function, args, kwargs)
            if results is not NotImplemented:
                return results
        if not modes or not only_default_devices():
            return result_of(args, kwargs)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        switched_off = private_torch.DisableTorchFunction
        if switched_off is None or any(type(x) not in PLAIN for x in tensors):  # which may have a function of their own
            return result_of(args, kwargs)
        with switched_off():
            result = repeated.run_repeated(name, args, kwargs)
            return result_of(args, kwargs) if result is NotImplemented else result

    return public
