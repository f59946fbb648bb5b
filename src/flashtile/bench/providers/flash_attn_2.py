"""FlashAttention-2: the package `flash_attn`."""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ...testing.case import Case
from .provider import Prepared, Provider, call_with_known, effective_window, first_of, from_autograd, require

TAKES = {"causal", "window", "softcap", "alibi_slopes", "dropout", "grouped heads", "packed sequences"}


class FlashAttention2(Provider):
    name = "fa2"

    def unusable(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn_2_cuda") is None:
            return "the package flash_attn is not installed"
        return None if device.type == "cuda" else f"flash_attn does not run on {device.type}"

    def version(self) -> str:
        return f"flash_attn {importlib.metadata.version('flash_attn')}"

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        import flash_attn  # type: ignore[import-not-found]

        require(case, "flash_attn", TAKES)
        arguments = case.arguments
        keywords: dict[str, Any] = {
            "window_size": effective_window(case),
            "alibi_slopes": arguments.get("alibi_slopes"),
        }
        keywords |= {"softcap": arguments.get("softcap")}
        if case.function == "attention_varlen":
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            keywords |= {name: arguments[name] for name in names} | {"dropout_p": arguments.get("dropout_p")}
            function = flash_attn.flash_attn_varlen_func
            return from_autograd(lambda q, k, v: first_of(call_with_known(function, q, k, v, **keywords)), case)
        if decode:
            keywords["cache_seqlens"] = arguments["k"].shape[2]
        else:
            keywords["dropout_p"] = arguments.get("dropout_p")
        function = flash_attn.flash_attn_with_kvcache if decode else flash_attn.flash_attn_func

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            rows = (x.transpose(1, 2) for x in (q, k, v))  # [B, S, H, D]
            return first_of(call_with_known(function, *rows, **keywords)).transpose(1, 2)

        return from_autograd(attend, case)
