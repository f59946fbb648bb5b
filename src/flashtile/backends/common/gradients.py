"""Gradients that follow from the numbers of rows alone."""

import torch
from torch import Tensor


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key without a value: `ds = p * (0 - delta)`, summed over rows to `[H]`."""
    p_sink = torch.where(lse == -torch.inf, 0, torch.exp(sinks.to(lse.dtype)[:, None] - lse))  # [(B,) H, S]
    return -sum_to_heads(p_sink * delta)


def sum_to_heads(rows: Tensor) -> Tensor:
    """`[B, H, S]` or `[H, T]` to `[H]`."""
    of_heads = rows.sum(dim=-1)
    return of_heads if of_heads.dim() == 1 else of_heads.sum(dim=0)
