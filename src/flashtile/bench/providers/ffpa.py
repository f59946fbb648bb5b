"""FFPA: the package `ffpa_attn`, for heads of more than 256 features."""

import importlib.metadata
import importlib.util
from typing import Any

import torch
from torch import Tensor

from ...testing.case import Case
from .provider import Declined, Prepared, Provider, from_autograd, require

BACKENDS = ("cutedsl", "triton")
LEAST_FEATURES = 257  # with fewer it calls PyTorch's function
TAKES = {"causal", "grouped heads"}


class Ffpa(Provider):
    """Its kernels in CuTe DSL or in Triton, for both passes."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.name = f"ffpa:{backend}"

    def unusable(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("ffpa_attn") is None:
            return "the package ffpa_attn (ffpa-attn) is not installed"
        return None if device.type == "cuda" else f"FFPA does not run on {device.type}"

    def version(self) -> str:
        return f"ffpa-attn {importlib.metadata.version('ffpa-attn')}"

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        from ffpa_attn import ffpa_attn_func  # type: ignore[import-not-found]

        require(case, "FFPA", TAKES)
        q, k = case.arguments["q"], case.arguments["k"]
        if q.shape[-1] < LEAST_FEATURES:
            raise Declined(f"FFPA has no kernel of its own for {q.shape[-1]} features")
        causal = bool(case.arguments.get("causal"))
        if causal and k.shape[2] < q.shape[2]:
            raise Declined("FFPA takes no causal call with fewer keys than queries")
        keywords: dict[str, Any] = {"is_causal": causal, "enable_gqa": True, "backend": self.backend}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ffpa_attn_func(q, k, v, **keywords)  # type: ignore[no-any-return]

        return from_autograd(attend, case)
