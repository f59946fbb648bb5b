"""Reshape `lse` between the shape that operators return and the one that tiles are read from."""

from torch import Tensor

from ...call.call import Call


def lse_to_rows(call: Call, lse: Tensor) -> Tensor:
    """`[B, H, S]` to `[B, H, S, 1]`, or varlen `[H, T]` to `[T, H, 1]`: the shape of `out` with one feature."""
    return (lse if call.tensors.q.dim() == 4 else lse.t())[..., None]


def rows_to_lse(call: Call, rows: Tensor) -> Tensor:
    """The inverse of `lse_to_rows`."""
    return (rows[..., 0] if call.tensors.q.dim() == 4 else rows[..., 0].t()).contiguous()
