"""Reshape `lse` between the shape that operators return and the one that tiles are read from."""

import torch
from torch import Tensor

from ...call.call import Call, split_row_stats


def lse_to_rows(call: Call, lse: Tensor) -> Tensor:
    """`[B, H, S]` to `[B, H, S, 1]`, or varlen `[H, T]` to `[T, H, 1]`: the shape of `out` with one feature."""
    return (lse if call.tensors.q.dim() == 4 else lse.t())[..., None]


def row_stats_to_rows(call: Call, stats: Tensor) -> tuple[Tensor, Tensor | None]:
    """lse and its residual, if that is kept, as `lse_to_rows`."""
    lse, residual = split_row_stats(call.tensors.q, stats)
    return lse_to_rows(call, lse), None if residual is None else lse_to_rows(call, residual)


def rows_to_row_stats(call: Call, lse: Tensor, residual: Tensor) -> Tensor:
    """The results of forward for operators: lse, with the residual where that is kept (`call.row_stats_shape`)."""
    if not call.keeps_residual:
        return rows_to_lse(call, lse)
    return torch.stack((rows_to_lse(call, lse), rows_to_lse(call, residual)))


def rows_to_lse(call: Call, rows: Tensor) -> Tensor:
    """The inverse of `lse_to_rows`."""
    return (rows[..., 0] if call.tensors.q.dim() == 4 else rows[..., 0].t()).contiguous()
