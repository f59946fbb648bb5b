"""Gradients that follow from the numbers of rows alone."""

import torch
from torch import Tensor

from ...call import Call


def sink_gradient(call: Call, lse: Tensor, delta: Tensor) -> Tensor:
    """`dsink = -sum of p_sink * delta` over rows, `[H]`."""
    assert call.tensors.sinks is not None
    sinks = call.tensors.sinks.float()[:, None]  # [H, 1]
    p_sink = torch.where(lse == -torch.inf, 0, torch.exp(sinks - lse))  # [(B,) H, S]
    return -sum_to_heads(p_sink * delta)


def sum_to_heads(rows: Tensor) -> Tensor:
    """`[B, H, S]` or `[H, T]` to `[H]`."""
    return rows.sum(dim=(0, 2) if rows.dim() == 3 else 1)
