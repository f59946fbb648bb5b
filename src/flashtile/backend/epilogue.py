"""The gradient of sinks, from the row statistics lse and delta."""

import torch
from torch import Tensor


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key without a value: `ds = p * (0 - delta)`, summed over rows to `[H]`."""
    return -sum_to_heads(sink_weight(sinks.to(lse.dtype)[:, None], lse) * delta)  # of [(B,) H, S]


def sink_weight(sink: Tensor, lse: Tensor) -> Tensor:
    """The sink's probability in each row: 1 for a sink of +inf, 0 where lse is -inf."""
    share = torch.where(sink == torch.inf, 1, torch.exp(sink - lse))
    return torch.where(lse == -torch.inf, 0, share)


def sum_to_heads(rows: Tensor) -> Tensor:
    """Sum `[B, H, S]` or `[H, T]` to `[H]`."""
    per_head = rows.sum(dim=-1)
    return per_head if per_head.dim() == 1 else per_head.sum(dim=0)
