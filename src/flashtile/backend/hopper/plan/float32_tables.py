"""Configurations of float32's kernels, by width. They multiply numbers in bfloat16 parts (`kernels.shared.parts`)."""

from dataclasses import dataclass

from ..tile_config import (
    ALIGN,
    Constexpr,
    DkdvConfig,
    DqConfig,
    Float32Forward,
    HeadDim,
    SplitBackwardConfig,
    TileConfig,
)

PARTS, PARTS_IF_TF32 = 3, 2  # parts of a number; fewer where PyTorch allows TF32, which has 11 bits: two have 16


@dataclass(frozen=True)
class SplitRows(Constexpr):
    """Kernel that splits `block_m` rows a program."""

    head_dim: HeadDim
    block_m: int = 32
    align: int = ALIGN


D64 = HeadDim((64,), 64, PARTS)
D80, D96, D128 = HeadDim((64, 16), 16, PARTS), HeadDim((64, 32), 32, PARTS), HeadDim((128,), 128, PARTS)


def configs(head_dim: HeadDim, forward: int, dq: tuple[int, int], dkdv: int) -> TileConfig:
    """Stages of forward, of dq and of the kernel for dk and dv, 64 keys or rows each, and dq's warpgroups."""
    stages, warpgroups = dq
    backward = SplitBackwardConfig(
        DqConfig(head_dim, head_dim, stages, num_warpgroups=warpgroups), DkdvConfig(head_dim, head_dim, dkdv)
    )
    return TileConfig(Float32Forward(head_dim, forward), backward)


CONFIGS = {  # by width of the kernels: 128 measured on an H100, the others derived from memory and registers
    64: configs(D64, forward=4, dq=(4, 1), dkdv=2),
    80: configs(D80, forward=4, dq=(3, 2), dkdv=2),
    96: configs(D96, forward=4, dq=(2, 2), dkdv=1),
    128: configs(D128, forward=2, dq=(2, 1), dkdv=1),
}
