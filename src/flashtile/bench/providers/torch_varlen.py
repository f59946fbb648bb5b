"""`torch.nn.attention.varlen.varlen_attn`: PyTorch's own attention over packed sequences, on CUDA."""

import inspect
from typing import Any

import torch
from torch import Tensor

from ...testing.case import Case
from .provider import Declined, Prepared, Provider, effective_window, from_autograd, group_of, require


class TorchVarlen(Provider):
    name = "torch_varlen"

    def unusable(self, device: torch.device) -> str | None:
        return None if device.type == "cuda" else f"varlen_attn does not run on {device.type}"

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        from torch.nn.attention.varlen import varlen_attn

        require(case, "varlen_attn", {"packed sequences", "causal", "window", "grouped heads"})
        if case.function != "attention_varlen":
            raise Declined("varlen_attn takes packed sequences only")
        arguments, parameters = case.arguments, inspect.signature(varlen_attn).parameters
        lengths = [arguments[name] for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")]
        left, right = effective_window(case)
        keywords: dict[str, Any] = {}
        if "window_size" in parameters:
            keywords["window_size"] = (left, right)
        elif (left, right) in ((-1, -1), (-1, 0)):
            keywords["is_causal"] = right == 0
        else:
            raise Declined("varlen_attn of this PyTorch takes no window")
        if group_of(case) > 1:
            if "enable_gqa" not in parameters:
                raise Declined("varlen_attn of this PyTorch takes no grouped heads")
            keywords["enable_gqa"] = True

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return varlen_attn(q, k, v, *lengths, **keywords)  # type: ignore[return-value]

        return from_autograd(attend, case)
