"""Kernel that computes the term of a score_mod for each head and near distance, once for all pairs
(`expression.tabulated`).
"""

from triton.experimental.gluon import language as gl

from .shared.compat import Pointer, Scalar, kernel
from .shared.score_mod import PairInputs


@kernel
def distance_table_kernel(
    distance_table: Pointer, num_blocks: Scalar, reach: Scalar, inputs: PairInputs, CONFIG: gl.constexpr
):  # fmt: skip
    """Store some elements of `distance_table [H, 2 * reach + 1]`."""
    BLOCK: gl.constexpr = CONFIG.block
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    h, block = gl.program_id(0) // num_blocks, gl.program_id(0) % num_blocks
    n = block * BLOCK + gl.arange(0, BLOCK, layout)
    q_idx, k_idx = gl.maximum(n - reach, 0), gl.maximum(reach - n, 0)
    term = CONFIG.score_mod.function(0.0, 0, h, q_idx, k_idx, inputs.captured)[0]
    gl.store(distance_table + (h * (2 * reach + 1) + n), term, mask=n <= 2 * reach)
