"""The backend's kernels by width: tiles, stages and registers that fit a core."""

from dataclasses import replace

from ..backward_config import DkdvConfig, DqConfig, FusedBackwardConfig, LateDq, SplitBackwardConfig
from ..tile_config import (
    EightBitForward,
    Float32Forward,
    ForwardConfig,
    HeadDim,
    LatentBytesForward,
    LatentForward,
    TangentsConfig,
    TileConfig,
)

# Boxes of 64 columns are loaded faster than narrower ones, which leave room for more stages.
D32, D64, D80, D96 = HeadDim((32,), 32), HeadDim((64,), 64), HeadDim((64, 16), 64), HeadDim((64, 32), 64)
D128, D192, D256 = HeadDim((128,), 128), HeadDim((128, 64), 64), HeadDim((256,), 256)
D160, D512, D512_APART = HeadDim((128, 32), 32), HeadDim((128,) * 4, 128), HeadDim((128,) * 4, 128, apart=True)


def three_warpgroups(head_dim: HeadDim, block_n: int) -> ForwardConfig:
    """Three warpgroups read keys less often, waste more rows at the end, and lack registers for speculative values."""
    columns = min(head_dim.width, 64)
    return ForwardConfig(head_dim, head_dim, columns, block_n, 3, 4, 160, 32, speculative_exps=0)


def one_warpgroup(head_dim: HeadDim, programs: int) -> ForwardConfig:
    """Programs of one warpgroup share a core and fill each other's gaps. Each reads its own keys, in short blocks."""
    return ForwardConfig(head_dim, head_dim, head_dim.width, 64, 1, 3, speculative_exps=0, programs_per_core=programs)


# By width of q and v; the first serves all features. Fields: widths, epilogue_columns, block_n, warpgroups, stages.
FORWARD = {
    (32, 32): (ForwardConfig(D32, D32, 32, 128, 2, 4), three_warpgroups(D32, 128), one_warpgroup(D32, programs=4)),
    (64, 64): (ForwardConfig(D64, D64, 64, 128, 2, 4), three_warpgroups(D64, 128), one_warpgroup(D64, programs=3)),
    (80, 80): (ForwardConfig(D80, D80, 128, 128, 2, 2), three_warpgroups(HeadDim((64, 16), 32), 64)),
    (96, 96): (ForwardConfig(D96, D96, 128, 128, 2, 2), three_warpgroups(HeadDim((64, 32), 32), 64)),
    (128, 128): (ForwardConfig(D128, D128, 128, 128, 2, 2),),
    (192, 128): (ForwardConfig(D192, D128, 64, 128, 2, 2, q_stages=1),),
    (160, 160): (ForwardConfig(D160, D160, 64, 128, 2, 2, q_stages=1, speculative_exps=8),),
    (192, 192): (ForwardConfig(D192, D192, 128, 64, 2, 3, q_stages=1, speculative_exps=12),),
    (256, 256): (ForwardConfig(D256, D256, 128, 64, 2, 2, q_stages=1, speculative_exps=12),),
    (512, 512): (
        ForwardConfig(D512_APART, D512_APART, 64, 64, 1, 1, q_stages=1, speculative_exps=8, column_warpgroups=2),
    ),
}
LATENT = LatentForward(HeadDim((*D512.chunks, 64), 64), HeadDim(D512.chunks, 64))  # values are the first columns of k
LATENT_BYTES = (
    LatentBytesForward(*LATENT.head_dims, block_m=16, block_n=64, in_flight=1),
    LatentBytesForward(*LATENT.head_dims, block_m=32),
    LatentBytesForward(*LATENT.head_dims, stages=3, consumer_registers=240, in_turn=True),
)
# By width; the first serves all features, the others plain calls.
FUSED_BACKWARD = {
    32: (FusedBackwardConfig(D32, 128, 2, early_half_exps=True),),
    64: (
        FusedBackwardConfig(D64, 128, 2, early_half_exps=True),
        # Blocks of 64 rows leave registers for late dq and for left operands.
        FusedBackwardConfig(D64, 64, 3, early_half_exps=True, late_dq=LateDq(3, (1, 1), (1, 1))),
    ),
    80: (FusedBackwardConfig(D80, 64, 2), FusedBackwardConfig(D80, 64, 3, late_dq=LateDq(3, values=(2, 2)))),
    # One warpgroup has more of dq.
    96: (FusedBackwardConfig(D96, 64, 2), FusedBackwardConfig(D96, 64, 3, late_dq=LateDq(3, values=(1, 2)))),
    128: (FusedBackwardConfig(D128, 64, 2), FusedBackwardConfig(D128, 64, 2, late_dq=LateDq(2))),
}
SPLIT_BACKWARD = {
    (192, 128): (SplitBackwardConfig(DqConfig(D192, D128, kv_stages=6), DkdvConfig(D192, D128, stages=3)),),
    (160, 160): (SplitBackwardConfig(DqConfig(D160, D160, kv_stages=7), DkdvConfig(D160, D160, stages=3)),),
    (192, 192): (
        SplitBackwardConfig(DqConfig(D192, D192, kv_stages=5), DkdvConfig(D192, D192, stages=2)),
        # Left operands in registers, which plain calls leave.
        SplitBackwardConfig(
            DqConfig(D192, D192, kv_stages=5, dout_in_registers=True),
            DkdvConfig(D192, D192, stages=3, keys_in_registers=True),
        ),
    ),
    (256, 256): (SplitBackwardConfig(DqConfig(D256, D256, kv_stages=3), DkdvConfig(D256, D256, stages=2)),),
    (512, 512): (  # dk's keeps keys and values in shared memory, and has 64 KB for rows
        SplitBackwardConfig(
            DqConfig(D512, D512, kv_stages=3, block_n=32, column_groups=2),
            DkdvConfig(D512, D512, stages=2, block_m=16, result="dk"),
            DkdvConfig(D512, D512, stages=2, block_m=32, result="dv"),
        ),
    ),
}
# By width of q and v. Up to 64 features Triton's kernel, which computes all in one pass, has the registers.
TANGENTS = {
    (96, 96): (TangentsConfig(D96, D96, 6),),
    (128, 128): (TangentsConfig(D128, D128, 8),),
    (192, 128): (TangentsConfig(D192, D128, 5),),
    (192, 192): (TangentsConfig(D192, D192, 5),),
    (256, 256): (TangentsConfig(D256, D256, 3, early_values=False),),
}


# By width of q, k and v in 8 bits. At 256 features a whole warpgroup transposes: two share the registers of a core.
WIDE_BYTES = EightBitForward(D256, D256, 64, 128, 2, 2, 232, q_stages=1, v_stages=1)
EIGHT_BIT = {
    64: EightBitForward(D64, D64, 64, 128, 3, 3, 160, transposed_stages=3),
    128: EightBitForward(D128, D128, 64, 128, 3, 3, 160),
    256: replace(WIDE_BYTES, transpose_warps=4, transpose_registers=24, transposed_words=32),
}


def float32(chunks: tuple[int, ...], forward: int, dq: int, warpgroups: int, dkdv: int) -> TileConfig:
    """Stages of forward, of dq and of the kernel for dk and dv, 64 keys or rows each, and dq's warpgroups. Numbers have
    three bfloat16 parts (`kernels.shared.parts`).
    """
    width = HeadDim(chunks, chunks[-1], parts=3)
    of_dq = DqConfig(width, width, dq, num_warpgroups=warpgroups)
    return TileConfig(Float32Forward(width, forward), SplitBackwardConfig(of_dq, DkdvConfig(width, width, dkdv)))


FLOAT32 = {  # by width: 128 measured on an H100, the others derived from memory and registers
    64: float32((64,), 4, 4, 1, 2),
    80: float32((64, 16), 4, 3, 2, 2),
    96: float32((64, 32), 4, 2, 2, 1),
    128: float32((128,), 2, 2, 1, 1),
}
