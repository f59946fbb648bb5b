"""The backend's kernels: tiles of rows and keys, warps and stages that fit a program, by width and shared memory."""

from typing import NamedTuple

from ....call.problem import LONGEST
from ..tile_config import BlockedSecond, KernelConfig, WidthConfigs


class Walk(NamedTuple):
    """A walk over "keys" or "rows", in steps, for blocks of the other side and heads up to `width`."""

    over: str
    block: int
    step: int
    num_warps: int
    num_stages: int
    width: int
    longest: int = LONGEST  # length of the side that is walked over; longer ones were not measured


NARROW = (  # tiles up to 256 features, for 99 KiB and more
    WidthConfigs(64, KernelConfig(128, 64, 4, 3), KernelConfig(64, 64, 4, 2), KernelConfig(64, 64, 4, 2)),
    WidthConfigs(128, KernelConfig(64, 64, 4, 2), KernelConfig(32, 64, 4, 2), KernelConfig(64, 32, 4, 2)),
    WidthConfigs(256, KernelConfig(64, 32, 4, 2), KernelConfig(32, 32, 4, 1), KernelConfig(32, 32, 4, 1)),
)
HALF = {  # float16 and bfloat16, by shared memory in KiB
    227: (
        WidthConfigs(64, KernelConfig(64, 64, 4, 3), KernelConfig(64, 64, 4, 3), KernelConfig(128, 64, 4, 3)),
        WidthConfigs(128, KernelConfig(128, 128, 8, 3), KernelConfig(32, 128, 8, 3), KernelConfig(128, 64, 8, 3)),
        WidthConfigs(256, KernelConfig(128, 64, 8, 2), KernelConfig(64, 64, 8, 1), KernelConfig(128, 32, 8, 2)),
        WidthConfigs(512, KernelConfig(64, 32, 8, 2), KernelConfig(32, 32, 8, 1), KernelConfig(32, 32, 8, 1)),
    ),
    163: (
        *NARROW,
        WidthConfigs(512, KernelConfig(32, 32, 8, 2), KernelConfig(32, 16, 8, 1), KernelConfig(32, 32, 8, 1)),
    ),
    99: (
        *NARROW,
        WidthConfigs(512, KernelConfig(32, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    ),
    64: (
        WidthConfigs(64, KernelConfig(128, 64, 4, 1), KernelConfig(64, 64, 4, 1), KernelConfig(64, 64, 4, 1)),
        WidthConfigs(128, KernelConfig(64, 64, 4, 1), KernelConfig(32, 64, 4, 1), KernelConfig(64, 32, 4, 1)),
        WidthConfigs(256, KernelConfig(64, 32, 4, 1), KernelConfig(16, 32, 4, 1), KernelConfig(32, 16, 4, 1)),
        WidthConfigs(512, KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    ),
}
SINGLE = {  # float32; exact products have no matrix units, so registers bound the tiles
    64: (
        WidthConfigs(64, KernelConfig(64, 32, 8, 1), KernelConfig(32, 32, 8, 1), KernelConfig(32, 32, 8, 1)),
        WidthConfigs(128, KernelConfig(32, 32, 8, 1), KernelConfig(16, 32, 8, 1), KernelConfig(32, 16, 8, 1)),
        WidthConfigs(256, KernelConfig(16, 32, 8, 1), KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1)),
        WidthConfigs(512, KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1)),
    ),
}
LARGE = KernelConfig(128, 64, 8, 1, precision="tf32x3")  # forward and dq: one program fills the registers of a core
SINGLE_TF32X3 = (  # Hopper's; wider tiles of float32 have no registers for compensated sums
    WidthConfigs(64, LARGE, KernelConfig(32, 32, 4, 1, precision="tf32x3"), LARGE),
    WidthConfigs(
        128,
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
        KernelConfig(32, 32, 8, 1, precision="tf32x3"),
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
    ),
)
# Tiles of plain calls, by the most features of their kernels: of 16 bits on chips with the most shared memory,
PLAIN_FORWARD = (
    (64, KernelConfig(64, 64, 4, 3)), (64, KernelConfig(128, 64, 4, 3)), (64, KernelConfig(64, 32, 4, 3)),
    (128, KernelConfig(64, 64, 4, 3)), (256, KernelConfig(64, 64, 4, 2)),
)  # fmt: skip
# there more tiles of backward,
MORE_DKDV = ((64, KernelConfig(64, 64, 4, 3)), (64, KernelConfig(32, 128, 4, 3)))
MORE_DQ = ((64, KernelConfig(128, 64, 4, 3)), (64, KernelConfig(128, 32, 4, 3)))
# on chips with mma.sync, for forward with a bias, for dk and dv, and for dq,
MMA_SYNC_BIASED = ((64, KernelConfig(64, 64, 4, 3)), (128, KernelConfig(128, 32, 4, 3)))
MMA_SYNC_DKDV = ((64, KernelConfig(32, 128, 4, 3)), (128, KernelConfig(32, 128, 8, 3)))
MMA_SYNC_DQ = ((64, KernelConfig(128, 32, 4, 3)), (128, KernelConfig(128, 32, 4, 2)), (256, KernelConfig(64, 32, 4, 1)))
# and of float32 on Hopper: for forward and dq, and for dk and dv.
MORE_SINGLE = (KernelConfig(64, 64, 4, 1, precision="tf32x3"), KernelConfig(32, 64, 4, 1, precision="tf32x3"))
MORE_SINGLE_DKDV = (KernelConfig(32, 64, 4, 1, precision="tf32x3"),)
# Of `kernels.mma`, on chips with mma.sync; those of one loop walk over rows.
MMA_FORWARD = tuple(
    (width, KernelConfig(*tile, mma=True))
    for width, tile in (
        (128, (128, 64, 4, 1)), (128, (128, 128, 8, 1)), (128, (64, 64, 4, 1)),
        (256, (64, 64, 4, 1)),
    )
)  # fmt: skip
MMA_ONE_LOOP = tuple(
    (width, KernelConfig(*tile, mma=True))
    for width, tile in (
        (64, (32, 128, 4, 2)), (64, (64, 64, 4, 2)),
        (128, (64, 128, 8, 1)), (128, (32, 128, 8, 2)), (128, (32, 128, 8, 1)), (128, (64, 64, 4, 1)),
        (256, (64, 64, 8, 1)), (256, (16, 64, 8, 1)),
    )
)  # fmt: skip
# Of rows that were split ahead into bfloat16 parts, up to 64 features.
SPLIT_DKDV = KernelConfig(64, 64, 4, 1, precision="bf16x6")
SPLIT_DQ = (KernelConfig(128, 64, 8, 2, precision="bf16x6"), KernelConfig(64, 64, 4, 1, precision="bf16x6"))
# Forward with tangents: on chips with the most shared memory, measured (`benchmarks/derivatives.py --candidates`); on
# others, chosen by ptxas, so that they spill at most 4 bytes a thread; and for float32.
MOST_TANGENTS = (
    (64, KernelConfig(64, 64, 4, 3)), (64, KernelConfig(128, 64, 8, 3)),
    (128, KernelConfig(128, 32, 8, 3)),
    (256, KernelConfig(32, 32, 4, 2)), (512, KernelConfig(16, 16, 8, 1)),
)  # fmt: skip
HALF_TANGENTS = (
    (64, KernelConfig(128, 32, 8, 2)), (64, KernelConfig(64, 32, 4, 2)),
    (128, KernelConfig(64, 32, 8, 2)),
    (256, KernelConfig(32, 32, 8, 2)), (512, KernelConfig(16, 16, 8, 1)),
)  # fmt: skip
SINGLE_TANGENTS = ((64, KernelConfig(32, 16, 8, 1)), (512, KernelConfig(16, 16, 8, 1)))
# Second derivatives, of rows and of keys: the first that fits (`benchmarks/second_derivatives.py`); and of float32.
SECOND_ROWS = (
    (64, KernelConfig(64, 64, 4, 2)), (128, KernelConfig(64, 32, 4, 2)), (128, KernelConfig(64, 32, 4, 1)),
    (256, KernelConfig(32, 32, 4, 1)), (512, KernelConfig(16, 16, 4, 1)),
)  # fmt: skip
SECOND_KEYS = (
    (64, KernelConfig(64, 64, 4, 2)), (128, KernelConfig(32, 128, 8, 1)), (128, KernelConfig(64, 32, 4, 1)),
    (256, KernelConfig(32, 32, 4, 1)), (512, KernelConfig(16, 16, 4, 1)),
)  # fmt: skip
# Of wide heads: weights of pairs in memory, and their products (`launch.second_blocks`).
# Chosen by ptxas, so that loops spill nothing in 16 bits.
BLOCKED_SECOND = BlockedSecond(
    KernelConfig(64, 64, 4, 2), KernelConfig(128, 64, 8, 3), KernelConfig(64, 128, 8, 3), columns=128, unit=128
)
BLOCKED_SINGLE = BlockedSecond(
    KernelConfig(64, 32, 4, 1, precision="tf32x3"), KernelConfig(64, 32, 8, 2, precision="tf32x3"),
    KernelConfig(32, 64, 8, 2, precision="tf32x3"), columns=64, unit=128,
)  # fmt: skip
SINGLE_SECOND = KernelConfig(16, 16, 4, 1, precision="tf32x3")
TF32_DKDV = KernelConfig(64, 32, 4, 1, precision="tf32x3")  # for one product
BIASED = WidthConfigs(  # calls of 16-bit numbers with a bias for each pair
    32, KernelConfig(64, 64, 4, 3), KernelConfig(32, 128, 4, 3), KernelConfig(128, 32, 4, 3)
)
BLOCKED_INTERPRETER = BlockedSecond(*(KernelConfig(16, 16, 4, 1),) * 3, columns=16, unit=32)
INTERPRETER = WidthConfigs(512, *(KernelConfig(16, 16, 4, 1),) * 3)
WALKS = (  # 16-bit inputs
    Walk("keys", 16, 64, 4, 3, width=64),
    Walk("keys", 32, 64, 4, 3, width=64),
    Walk("keys", 64, 64, 4, 3, width=64),
    Walk("keys", 128, 64, 4, 3, width=32),
    Walk("rows", 16, 128, 4, 2, width=16),
    Walk("rows", 256, 64, 8, 1, width=32, longest=256),
    Walk("keys", 256, 64, 8, 1, width=64, longest=256),
)
INTERPRETER_WALKS = tuple(Walk(over, 16, 16, 4, 1, width=512) for over in ("keys", "rows"))
# One warp for 16 rows of up to 96 features, which waits less for the others.
ONE_WARP, ONE_WARP_WIDTH = KernelConfig(16, 32, 1, 4), 96
