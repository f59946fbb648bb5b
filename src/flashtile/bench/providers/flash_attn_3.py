"""FlashAttention-3: its compiled operators, from the package `flash_attn_interface` or from a library file."""

import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...testing.case import Case
from .provider import Prepared, Provider, effective_window, from_autograd, require, softmax_scale

TAKES = {"causal", "window", "softcap", "grouped heads", "packed sequences", "Dv other than D"}
RUNTIME = "libcudart.so.12"  # next to the library, if the process has another version


class FlashAttention3(Provider):
    name = "fa3"

    def __init__(self, library: Path | None = None) -> None:
        self.library = library

    def unusable(self, device: torch.device) -> str | None:
        if self.library is not None and not self.library.is_file():
            return f"there is no library {self.library.name} where --fa3-library points"
        if self.library is None and importlib.util.find_spec("flash_attn_interface") is None:
            return "the package flash_attn_interface is not installed, and no --fa3-library is given"
        return None if device.type == "cuda" else f"FlashAttention-3 does not run on {device.type}"

    def version(self) -> str:
        return "flash_attn_3" if self.library is None else self.library.name

    def operators(self) -> Any:
        """`torch.ops.flash_attn_3`, loaded once."""
        if not hasattr(torch.ops.flash_attn_3, "fwd"):
            if self.library is None:
                importlib.import_module("flash_attn_interface")
            else:
                if (self.library.parent / RUNTIME).is_file():
                    ctypes.CDLL(str(self.library.parent / RUNTIME), mode=ctypes.RTLD_GLOBAL)
                torch.ops.load_library(self.library)
        return torch.ops.flash_attn_3

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        require(case, "FlashAttention-3", TAKES)
        operators, arguments = self.operators(), case.arguments
        left, right = effective_window(case)
        keywords: dict[str, Any] = {"softmax_scale": softmax_scale(case), "softcap": arguments.get("softcap") or 0.0}
        if (left, right) == (-1, 0):
            keywords["is_causal"] = True
        else:
            keywords |= {"window_size_left": left, "window_size_right": right}
        packed = case.function == "attention_varlen"
        if packed:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            keywords |= {name: arguments[name] for name in names}

        def rows(x: Tensor) -> Tensor:  # [B, H, S, D] <-> [B, S, H, D]
            return x if packed else x.transpose(1, 2)

        attend = attention_of(operators, keywords | {"num_splits": 0 if decode else 1})  # 0: its own choice
        in_rows = replace(case, arguments=arguments | {name: rows(arguments[name]) for name in ("q", "k", "v")})
        prepared = from_autograd(attend, in_rows)
        backward = prepared.backward
        if backward is None:
            return Prepared(lambda: rows(prepared.forward()))
        return Prepared(lambda: rows(prepared.forward()), lambda dout: tuple(map(rows, backward(rows(dout)))))


def attention_of(operators: Any, keywords: dict[str, Any]) -> Callable[..., Tensor]:
    """`attend(q, k, v) -> out` over the compiled operators, by a function of PyTorch's autograd, as the package's own
    interface has it.
    """
    of_backward = {name: x for name, x in keywords.items() if name != "num_splits"}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, lse = operators.fwd(q, k, v, **keywords)[:2]
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            gradients = tuple(torch.empty_like(x) for x in (q, k, v))
            operators.bwd(dout, q, k, v, out, lse, *gradients, **of_backward)
            return gradients

    return Attention.apply
