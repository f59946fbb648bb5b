"""The rows of a rank out of a whole tensor, and the whole tensor out of all ranks' rows."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError
from .group import Grid, grid_of
from .layout import EXAMPLE, Layout, Placement, layout_of, layout_of_whole


def shard(
    x: Tensor, mesh: DeviceMesh, dim: int, *, layout: str | Layout = "contiguous", length: int | None = None
) -> Tensor:
    """Take this rank's rows of a tensor that all ranks have.

    Differentiable: the gradient of `x` is put together from all ranks' gradients, and is the same on each rank. All
    ranks of the mesh must run backward.

    Args:
        x: a tensor of any dtype, the same on each rank.
        mesh: a `DeviceMesh` with one or two dimensions.
        dim: the dimension of the sequence: 2 for `[B, H, S, D]`.
        layout: "contiguous", "zigzag", which balances causal attention, "chunks", as DTensors have it, or a `Layout`
            that `balanced` finds for a mask.
        length: rows of `x`. Required with a name of a layout where the ranks' rows are not as many on each, for
            `attention` and `unshard` then need it too.

    Returns:
        The rank's rows, in a tensor of their own.

    Raises:
        ArgumentError: `mesh`, `dim`, `layout` or `length` is not one of those.
    """
    grid, dim = grid_of(mesh), dimension(x, dim)
    whole = layout_of_whole(layout, x.shape[dim], grid.size)
    if length != x.shape[dim] and not (length is None and (whole.even or isinstance(layout, Layout))):
        multiple = grid.size * whole.pieces_per_rank
        accepted = f"the {x.shape[dim]} rows of x; None, if they are a multiple of {multiple}"
        raise ArgumentError("length", length, accepted, EXAMPLE)
    return Shard.apply(x, grid, dim, whole)  # type: ignore[no-any-return]


def unshard(
    x: Tensor,
    mesh: DeviceMesh,
    dim: int,
    *,
    layout: str | Layout = "contiguous",
    length: int | None = None,
    check: bool = False,
) -> Tensor:
    """Gather the whole tensor from each rank's rows: the inverse of `shard`.

    Differentiable: each rank's gradient is its own rows of the gradient of the result. So all ranks have to compute the
    same loss from the result.

    Args:
        x: this rank's rows, as `shard` gives them; dtype and other dimensions are the same on all ranks.
        mesh: a `DeviceMesh` with one or two dimensions.
        dim: the dimension of the sequence.
        layout: as in `shard`.
        length: rows of the whole tensor. `None`: all ranks have as many, or as a `Layout` says.
        check: compare all ranks' shapes and dtypes first. This waits for the device.

    Returns:
        The whole tensor, on each rank.

    Raises:
        ArgumentError: `mesh`, `dim`, `layout` or `length` is not one of those, or the rows are not the layout's.
    """
    grid, dim = grid_of(mesh), dimension(x, dim)
    ranks = [(x.shape[dim], (*x.shape[:dim], *x.shape[dim + 1 :]), x.dtype)]
    if check:
        ranks = grid.gather(ranks[0])
        length = sum(n for n, *_ in ranks) if length is None else length
    whole = layout_of("x", layout, x.shape[dim], grid.size, length)
    for rank, (n, *others) in zip(range(grid.size) if check else [grid.rank], ranks, strict=True):
        if n != whole.rows(rank) or others != list(ranks[0][1:]):
            accepted = f"on rank {rank}, {whole.rows(rank)} rows in dimension {dim}, and otherwise as rank 0"
            raise ArgumentError("x", f"on rank {rank}: {n} rows of {tuple(others)}", accepted, EXAMPLE)
    return Unshard.apply(x, grid, dim, whole)  # type: ignore[no-any-return]


def dimension(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ArgumentError("dim", dim, f"a dimension of x, which has {x.dim()}", EXAMPLE)
    return dim % x.dim()


def collect(x: Tensor, grid: Grid, dim: int, layout: Layout) -> Tensor:
    """The whole of a tensor from this rank's rows. Shards travel padded to the longest one."""
    placement = Placement.of(layout)
    longest = max(map(placement.rows, range(grid.size)))
    padded = x.new_zeros((longest, *x.shape[:dim], *x.shape[dim + 1 :]))
    padded[: x.shape[dim]] = x.movedim(dim, 0)
    shards = grid.gather_tensors(padded) if padded.numel() > 0 else padded.expand(grid.size, *padded.shape)
    return placement.assemble(list(shards), 0).movedim(0, dim).contiguous()


class Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, dim: int, layout: Layout) -> Tensor:  # type: ignore[override]
        ctx.place = grid, dim, layout
        return Placement.of(layout).select(x, grid.rank, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return Unshard.apply(dx, *ctx.place), None, None, None


class Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid, dim: int, layout: Layout) -> Tensor:  # type: ignore[override]
        ctx.place = grid, dim, layout
        return collect(x, grid, dim, layout)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return Shard.apply(dx, *ctx.place), None, None, None
