"""Between the operators' shapes and the rows that tiles are read from."""

from torch import Tensor

from ...call.call import Call


def lse_to_rows(call: Call, lse: Tensor) -> Tensor:
    """`[B, H, S]` to `[B, H, S, 1]`, or varlen `[H, T]` to `[T, H, 1]`: the shape of `out` with one column."""
    return (lse if call.tensors.q.dim() == 4 else lse.t())[..., None]


def rows_to_lse(call: Call, rows: Tensor) -> Tensor:
    """The inverse of `rows_of_lse`."""
    return (rows[..., 0] if call.tensors.q.dim() == 4 else rows[..., 0].t()).contiguous()
