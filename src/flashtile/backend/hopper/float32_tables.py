"""Configurations of float32's kernels, by width. They multiply numbers in bfloat16 parts (`kernels.shared.parts`)."""

from dataclasses import dataclass

from ...call.problem import Problem
from .tile_config import (
    ALIGN,
    Constexpr,
    DkdvConfig,
    DqConfig,
    Float32Forward,
    HeadDim,
    SplitBackwardConfig,
    TileConfig,
)
from .widths import widths

PARTS, PARTS_IF_TF32 = 3, 2  # of a number; fewer where PyTorch allows TF32, which has 11 bits: two have 16


@dataclass(frozen=True)
class SplitRows(Constexpr):
    """Kernel that splits `block_m` rows a program."""

    head_dim: HeadDim
    block_m: int = 32
    align: int = ALIGN


D32, D64, D128 = (HeadDim((width,), width, PARTS) for width in (32, 64, 128))
D80, D96 = HeadDim((64, 16), 16, PARTS), HeadDim((64, 32), 32, PARTS)


def configs(head_dim: HeadDim, forward: tuple[int, int], dq: tuple[int, int, int], dkdv: tuple[int, int]) -> TileConfig:
    """Keys and stages of forward; keys, stages and warpgroups of dq; rows and stages of the kernel for dk and dv."""
    keys, stages, warpgroups = dq
    rows, row_stages = dkdv
    backward = SplitBackwardConfig(
        DqConfig(head_dim, head_dim, stages, keys, warpgroups, padding=rows),
        DkdvConfig(head_dim, head_dim, row_stages, rows),
    )
    return TileConfig(Float32Forward(head_dim, *forward), backward)


CONFIGS = {  # by width of the kernels
    32: configs(D32, (64, 6), (64, 6, 2), (64, 3)),
    64: configs(D64, (64, 4), (64, 4, 2), (64, 2)),
    80: configs(D80, (64, 4), (64, 3, 2), (64, 2)),
    96: configs(D96, (64, 4), (64, 2, 2), (64, 1)),
    128: configs(D128, (64, 2), (64, 2, 1), (64, 1)),
}


def tile_config(problem: Problem) -> TileConfig:
    """The configurations of the narrowest kernels that hold the head dimensions."""
    width = widths(problem)
    assert width is not None  # `support` declines others
    return CONFIGS[width[0]]
