"""The rows of a rank out of a whole tensor, and the whole tensor out of all ranks' rows."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError
from .group import Group, group_of
from .layout import EXAMPLE, Layout, kind_of


def shard(x: Tensor, mesh: DeviceMesh, dim: int, *, layout: str = "contiguous") -> Tensor:
    """Take this rank's rows of a tensor that all ranks have.

    Differentiable: the gradient of `x` is put together from all ranks' gradients, and is the same on each rank. All
    ranks of the mesh must run backward.

    Args:
        x: a tensor of any dtype, the same on each rank.
        mesh: a `DeviceMesh` with one dimension.
        dim: the dimension of the sequence: 2 for `[B, H, S, D]`.
        layout: "contiguous", or "zigzag", which balances causal attention.

    Returns:
        The rank's rows, in a tensor of their own.

    Raises:
        ArgumentError: `mesh`, `dim` or `layout` is not one of those.
    """
    group, kind, dim = group_of(mesh), kind_of(layout), dimension(x, dim)
    return Shard.apply(x, group, dim, Layout(kind, x.shape[dim], group.size))  # type: ignore[no-any-return]


def unshard(x: Tensor, mesh: DeviceMesh, dim: int, *, layout: str = "contiguous") -> Tensor:
    """Gather the whole tensor from each rank's rows: the inverse of `shard`.

    Differentiable: each rank's gradient is its own rows of the gradient of the result. So all ranks have to compute the
    same loss from the result.

    Args:
        x: this rank's rows, as `shard` gives them; dtype and other dimensions are those of all ranks.
        mesh: a `DeviceMesh` with one dimension.
        dim: the dimension of the sequence.
        layout: that of `shard`.

    Returns:
        The whole tensor, on each rank.

    Raises:
        ArgumentError: `mesh`, `dim` or `layout` is not one of those, or the ranks' rows are not those of the layout.
    """
    group, kind, dim = group_of(mesh), kind_of(layout), dimension(x, dim)
    rows = group.gather((x.shape[dim], (*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype))
    whole = Layout(kind, sum(n for n, *_ in rows), group.size)
    for rank, (n, *others) in enumerate(rows):
        if n != whole.rows(rank) or others != list(rows[0][1:]):
            accepted = f"on rank {rank}, {whole.rows(rank)} rows in dimension {dim}, and otherwise as rank 0"
            raise ArgumentError("x", f"on rank {rank}: {n} rows of {tuple(others)}", accepted, EXAMPLE)
    return Unshard.apply(x, group, dim, whole)  # type: ignore[no-any-return]


def dimension(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ArgumentError("dim", dim, f"a dimension of x, which has {x.dim()}", EXAMPLE)
    return dim % x.dim()


def select(x: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """A rank's rows of a whole tensor."""
    return torch.cat([x.narrow(dim, piece.start, piece.stop - piece.start) for piece in layout.pieces(rank)], dim)


def collect(x: Tensor, group: Group, dim: int, layout: Layout) -> Tensor:
    """The whole of a tensor of which this rank has its rows. Shards travel padded to the longest one."""
    rows = [layout.rows(rank) for rank in range(group.size)]
    padded = x.new_zeros((max(rows), *x.shape[:dim], *x.shape[dim + 1 :]))
    padded[: x.shape[dim]] = x.movedim(dim, 0)
    shards = [torch.empty_like(padded) for _ in rows]
    if padded.numel() > 0:
        dist.all_gather(shards, padded, group=group.handle)
    whole = x.new_empty((layout.length, *padded.shape[1:]))
    for rank, part in enumerate(shards):
        first = 0
        for piece in layout.pieces(rank):
            length = piece.stop - piece.start
            whole[piece.start : piece.stop] = part[first : first + length]
            first += length
    return whole.movedim(0, dim).contiguous()


class Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, layout: Layout) -> Tensor:  # type: ignore[override]
        ctx.place = group, dim, layout
        return select(x, dim, layout, group.rank)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group, dim, layout = ctx.place
        return Unshard.apply(dx, group, dim, layout), None, None, None


class Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, layout: Layout) -> Tensor:  # type: ignore[override]
        ctx.place = group, dim, layout
        return collect(x, group, dim, layout)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        group, dim, layout = ctx.place
        return Shard.apply(dx, group, dim, layout), None, None, None
