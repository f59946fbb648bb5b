"""FlashAttention-4: the package `flash_attn.cute`, written in CuTe DSL."""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ...testing.case import Case
from .provider import Prepared, Provider, call_with_known, effective_window, first_of, from_autograd, require

TAKES = {"causal", "window", "softcap", "sinks", "grouped heads", "packed sequences", "Dv other than D"}


class FlashAttention4(Provider):
    name = "fa4"

    def unusable(self, device: torch.device) -> str | None:
        try:
            spec = importlib.util.find_spec("flash_attn.cute")
        except ModuleNotFoundError:
            spec = None
        if spec is None:
            return "the package flash_attn.cute (flash-attn-4) is not installed"
        return None if device.type == "cuda" else f"FlashAttention-4 does not run on {device.type}"

    def version(self) -> str:
        try:
            return f"flash-attn-4 {importlib.metadata.version('flash-attn-4')}"
        except importlib.metadata.PackageNotFoundError:
            return "flash_attn.cute"

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func  # type: ignore[import-not-found]

        require(case, "FlashAttention-4", TAKES)
        arguments = case.arguments
        left, right = effective_window(case)
        keywords: dict[str, Any] = {"softcap": arguments.get("softcap"), "learnable_sink": arguments.get("sinks")}
        if (left, right) == (-1, 0):
            keywords["causal"] = True
        elif (left, right) != (-1, -1):
            keywords["window_size"] = tuple(None if n < 0 else n for n in (left, right))
        if case.function == "attention_varlen":
            keywords |= {name: arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k")}
            return from_autograd(
                lambda q, k, v: first_of(call_with_known(flash_attn_varlen_func, q, k, v, **keywords)), case
            )

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, H, D]
            return first_of(call_with_known(flash_attn_func, *rows, **keywords)).transpose(1, 2)

        return from_autograd(attend, case)
