"""`torch.nn.functional.scaled_dot_product_attention` with its own choice, and a provider for each of its backends."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.functional import scaled_dot_product_attention

from ...testing.case import Case
from .provider import (
    Declined,
    Prepared,
    Provider,
    added_by_score_mod,
    from_autograd,
    group_of,
    relative_position,
    require,
    require_free_memory,
    visible_pairs,
)

BACKENDS = {  # and what lets PyTorch choose them; `sdpa_kernel` does as much, but takes as long on the host as a call
    "flash": cuda.enable_flash_sdp,
    "efficient": cuda.enable_mem_efficient_sdp,
    "cudnn": cuda.enable_cudnn_sdp,
    "math": cuda.enable_math_sdp,
}
TAKES = {"causal", "window", "bias", "mask", "alibi_slopes", "score_mod", "dropout", "grouped heads", "Dv other than D"}


class Sdpa(Provider):
    def __init__(self, backend: str) -> None:
        """`backend` is a key of BACKENDS; if it is empty, PyTorch chooses."""
        self.name, self.backend = f"sdpa:{backend}" if backend else "sdpa", backend

    def unusable(self, device: torch.device) -> str | None:
        if device.type == "cpu" and self.backend in ("efficient", "cudnn"):
            return "PyTorch has no such kernels for a CPU"
        return None

    def prepare(self, case: Case, decode: bool = False) -> Prepared:
        require(case, "scaled_dot_product_attention", TAKES)
        arguments = case.arguments
        square = arguments["q"].shape[2] == arguments["k"].shape[2]
        is_causal = bool(arguments.get("causal")) and square and not arguments.get("window")
        mask = dense_mask(case, with_window=not is_causal)
        if mask is not None and is_causal:  # the call takes one or the other
            is_causal, mask = False, dense_mask(case, with_window=True)
        if self.backend == "math":
            require_free_memory(case, 5 if case.differentiates else 3, "score matrices")
        keywords: dict[str, Any] = {"dropout_p": arguments.get("dropout_p", 0.0), "is_causal": is_causal}
        keywords["enable_gqa"] = group_of(case) > 1

        def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, mask, **keywords)

        def named(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            try:
                for name, enable in BACKENDS.items():
                    enable(name == self.backend)
                return chosen(q, k, v)
            finally:
                for enable in BACKENDS.values():
                    enable(True)

        prepared = from_autograd(named if self.backend else chosen, case)
        first_call(prepared.forward)
        words = "a mask [.., Sq, Sk] in memory" if mask is not None and mask.shape[2] > 1 else ""
        return Prepared(prepared.forward, prepared.backward, words)


def first_call(run: Callable[[], Tensor]) -> None:
    """Turn PyTorch's error of a call that a backend does not take into `Declined`, with the reasons from warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except RuntimeError as error:
            words = str(error).splitlines()[0]
            if not words.startswith(("No available kernel", "No viable backend", "Invalid backend")):
                raise
            reasons = [str(warning.message).split(" (Triggered")[0] for warning in caught]
            raise Declined(" ".join([words.split(". ")[0] + ".", *reasons])) from error


def dense_mask(case: Case, *, with_window: bool) -> Tensor | None:
    """Mask and additive terms as one tensor that broadcasts to [B, H, Sq, Sk]: bool if nothing is added, otherwise q's
    dtype.
    """
    arguments = case.arguments
    q, k = arguments["q"], arguments["k"]
    visible, added = arguments.get("mask"), arguments.get("bias")
    window = visible_pairs(case) if with_window else None
    if window is not None:
        require_free_memory(case, 1 / (q.shape[0] * q.shape[1]), "a mask")
        visible = window[None, None] if visible is None else visible & window
    if arguments.get("alibi_slopes") is not None:
        require_free_memory(case, 2 / q.shape[0], "a bias")
        distance = relative_position(q.shape[2], k.shape[2], q.device).abs()
        slopes = -arguments["alibi_slopes"][None, :, None, None] * distance
        added = slopes.to(q.dtype) if added is None else added + slopes.to(q.dtype)
    if arguments.get("score_mod") is not None:
        terms = added_by_score_mod(case)
        added = terms if added is None else added + terms
    if added is None or visible is None:
        return visible if added is None else added
    return added.masked_fill(~visible, -torch.inf)
