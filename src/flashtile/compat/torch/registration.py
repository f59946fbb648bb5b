"""PyTorch's own attention functions, run in flashtile between `activate` and `restore`.

PyTorch has a registry for implementations of flash attention, `torch.nn.attention.register_flash_attention_impl`. The
name "flashtile" is in it once this module is imported, which changes no function yet.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.library import Library
from torch.nn import attention as registry

from ... import private_torch
from ...call import counting
from ...errors import AttentionError
from ..arguments import refuse
from . import kernels
from .priority import FlashFirst

NAME = "flashtile"
EXAMPLE = "flashtile.compat.torch.scaled_dot_product_attention(query, key, value, dropout_p=0.1)"
HAS_REGISTRY = hasattr(registry, "restore_flash_attention_impl")  # from PyTorch 2.11 on; 2.10 cannot undo one


# Backward operators that PyTorch has no kernel for on a device, by name and key: they stay, so that backward may come
# after `restore`. Each is registered once, as PyTorch 2.11 and 2.12 refuse a second kernel from Python.
lasting: dict[tuple[str, str], Library] = {}


def overload_of(name: str) -> Any:
    """One of PyTorch's operators, by its name and perhaps `.overload`; `None` in versions without it."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def without_dropout(name: str, key: str) -> Callable[..., Any]:
    """A kernel that leaves calls with dropout to PyTorch's own. Backward may run after `restore`, a recomputed forward
    pass too, and neither would repeat a mask of flashtile's.
    """
    theirs = private_torch.registered_kernel(f"aten::{name}", key)
    operator, direction = f"aten.{name}", "backward" if name.endswith("_backward") else "forward"
    overload = overload_of(name)
    assert overload is not None  # others are not registered
    place = [x.name for x in overload._schema.arguments].index("dropout_p")

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= place or args[place] == 0:  # the dispatcher omits defaults
            with counting.in_place_of(operator) if counting.opened else nullcontext():
                return kernels.OPERATORS[key][name](*args, **kwargs)
        if theirs is None:
            accepted = "0 while flashtile is active, where PyTorch has no kernel to draw its dropout mask"
            refuse("dropout_p", args[place], accepted, EXAMPLE)
        results = theirs(*args, **kwargs)
        if counting.opened:
            counting.add(operator, direction, counting.PYTORCH, ("not flashtile: dropout",))
        return results

    return run


class Kernels:
    """Kernels in PyTorch's dispatcher, and flash attention before other implementations, until they are removed: the
    handle that the registry keeps.
    """

    def __init__(self) -> None:
        self.libraries: list[Library] = []
        self.priority = FlashFirst()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
                for key, operators in kernels.OPERATORS.items():
                    self.libraries.append(Library("aten", "IMPL", key))
                    for name in operators:
                        if overload_of(name) is not None:  # older versions have fewer
                            self.register(name, key)
        except BaseException:
            self.remove()
            raise

    def register(self, name: str, key: str) -> None:
        if (name, key) in lasting:
            return
        lasts = name.endswith("_backward") and not private_torch.has_kernel(f"aten::{name}", key)
        library = Library("aten", "IMPL", key) if lasts else self.libraries[-1]
        library.impl(name, without_dropout(name, key), key)
        if lasts:
            lasting[name, key] = library

    def remove(self) -> None:
        self.priority.undo()
        for library in self.libraries:
            library._destroy()
        self.libraries = []


class Activation:
    """Context manager that `activate` returns. At its end the implementation is active that was so before."""

    def __init__(self, before: str | None):
        self.before = before

    def __enter__(self) -> "Activation":
        return self

    def __exit__(self, *exception: object) -> None:
        restore()
        if self.before is not None:
            registry.activate_flash_attention_impl(self.before)


def activate() -> Activation:
    """Run `torch.nn.functional.scaled_dot_product_attention` and `torch.nn.attention.varlen.varlen_attn` in flashtile.

    The first on CPUs and GPUs, wherever PyTorch chooses flash attention for a call; the second on both too. PyTorch
    then tries flash attention before its other implementations, which on Hopper and Blackwell it does not by itself.
    The same as `torch.nn.attention.activate_flash_attention_impl("flashtile")`.

    Raises:
        AttentionError: PyTorch is older than 2.11, whose registry is the first that can undo an activation.
    """
    if not HAS_REGISTRY:
        raise AttentionError(
            f"PyTorch {torch.__version__} has no restore_flash_attention_impl.\n  accepted: PyTorch 2.11 or newer\n"
            "  a call that works: flashtile.compat.torch.scaled_dot_product_attention(query, key, value)"
        )
    before = registry.current_flash_attention_impl()
    if before != NAME:
        try:
            registry.activate_flash_attention_impl(NAME)
        except BaseException:
            if before is not None:
                registry.activate_flash_attention_impl(before)
            raise
    return Activation(None if before == NAME else before)


def restore() -> None:
    """Undo `activate`; PyTorch's kernels are back. Changes nothing while another implementation is active."""
    if HAS_REGISTRY and registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()


if HAS_REGISTRY:
    registry.register_flash_attention_impl(NAME, register_fn=Kernels)
