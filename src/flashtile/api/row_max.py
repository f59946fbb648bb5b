"""The largest score of each row, which other libraries' names can return."""

from typing import Any

import torch
from torch import Tensor

from ..call.problem import Problem, accumulation_dtype
from ..dispatch.planner import plan
from .normalize import normalize


@torch.no_grad()
def row_max(q: Tensor, k: Tensor, v: Tensor, *, score_mod: Any, mask: Any, scale: float | None) -> Tensor:
    """The largest score of each row, by a pass over all pairs in torch operations.

    Args:
        q, k, v: as `attention` has accepted them before; nothing is checked again.
        score_mod, mask, scale: as in `attention`.

    Returns:
        `[B, Hq, Sq]` in float32 (float64 for float64 inputs), without a derivative; -inf of a row that sees no key.
    """
    from ..backend.tiled import forward

    tensors = {"q": q, "k": k, "v": v, "mask": mask, "bias": None, "alibi_slopes": None, "sinks": None}
    call = normalize(
        "attention",
        tensors,
        causal=False,
        window=None,
        scale=scale,
        softcap=None,
        score_mod=score_mod,
        dropout_p=0.0,
        dropout_seed=None,
        deterministic=None,
        backend="tiled",
    )
    tile = plan(Problem.describe(call), q.device, "tiled").tile
    return forward.row_max(call, tile, accumulation_dtype(call.tensors.q.dtype))
