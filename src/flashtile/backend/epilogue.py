"""Gradients that follow from the numbers of rows alone."""

import torch
from torch import Tensor


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key without a value: `ds = p * (0 - delta)`, summed over rows to `[H]`."""
    return -sum_to_heads(sink_weight(sinks.to(lse.dtype)[:, None], lse) * delta)  # of [(B,) H, S]


def sink_weight(sink: Tensor, lse: Tensor) -> Tensor:
    """The sink's share of its rows: all of it for a sink of +inf, nothing where a row has seen nothing."""
    share = torch.where(sink == torch.inf, 1, torch.exp(sink - lse))
    return torch.where(lse == -torch.inf, 0, share)


def sum_to_heads(rows: Tensor) -> Tensor:
    """`[B, H, S]` or `[H, T]` to `[H]`."""
    per_head = rows.sum(dim=-1)
    return per_head if per_head.dim() == 1 else per_head.sum(dim=0)
