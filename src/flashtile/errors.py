"""Errors and warnings. Each says the argument, the given value, what is accepted, and a call that works."""

import copyreg
from typing import Any

import torch


class AttentionError(ValueError):
    """Any error that flashtile raises about a call, before a kernel runs."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the finished message and the attributes. By default `__init__` would be called again, with
        the message in place of its arguments, and a process pool whose worker raises the error would wait for ever.
        """
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ArgumentError(AttentionError):
    """One argument of a call is not what the call accepts. The message has a call that works.

    Attributes:
        argument: its name, so that a caller can tell errors apart without reading the message.
    """

    def __init__(self, argument: str, given: Any, accepted: str, example: str = "flashtile.attention(q, k, v)"):
        self.argument = argument
        super().__init__(
            f"`{argument}` is {describe(given)}.\n  accepted: {accepted}\n  a call that works: {example}",
        )


class SignatureError(ArgumentError, TypeError):
    """A keyword that a public function does not have, or too many positional arguments."""


class BackendError(AttentionError):
    """No backend takes the call, or the named one declines it.

    Attributes:
        reasons: one reason for each backend asked, by its name.
    """

    def __init__(self, message: str, reasons: dict[str, str], works: str = "auto"):
        self.reasons = reasons
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"{message}{lines}\n  a call that works: {call_of('attention', f'backend={works!r}')}")


CALLS = {
    "attention": "flashtile.attention(q, k, v{})",
    "attention_varlen": "flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens{})",
    "attention_with_kvcache": "flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths{})",
}


def call_of(function: str, keyword: str = "") -> str:
    """A call of a public function that works, as errors show it: `call_of("attention", "causal=True")`."""
    return CALLS[function].format(keyword and f", {keyword}")


class AttentionWarning(UserWarning):
    """A warning about a call that is right but slower than the machine allows."""


def describe(value: Any) -> str:
    """A value as an error message shows it: tensors by shape, dtype and device, never by their elements."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        layout = "" if value.layout is torch.strided else f" of layout {value.layout}"
        if value.is_nested:
            return f"a nested tensor ({dtype}, on {value.device})"
        kind = "tensor" if type(value) in (torch.Tensor, torch.nn.Parameter) else type(value).__name__
        return f"a {kind} {list(value.shape)} ({dtype}, on {value.device}){layout}"
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text}" if len(text) < 80 else f"{type(value).__name__} {text[:77]}..."
