"""Gradients that follow from the numbers of rows alone."""

import torch
from torch import Tensor

from ...call import Call


def sink_gradient(call: Call, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key without a value: `ds = p * (0 - delta)`, summed over rows to `[H]`."""
    assert call.tensors.sinks is not None
    sinks = call.tensors.sinks.to(lse.dtype)[:, None]  # [H, 1]
    p_sink = torch.where(lse == -torch.inf, 0, torch.exp(sinks - lse))  # [(B,) H, S]
    return -sum_to_heads(p_sink * delta)


def sum_to_heads(rows: Tensor) -> Tensor:
    """`[B, H, S]` or `[H, T]` to `[H]`."""
    of_heads = rows.sum(dim=-1)
    return of_heads if of_heads.dim() == 1 else of_heads.sum(dim=0)
