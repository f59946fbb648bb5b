"""Choice of a problem's configurations, by width: measured on an H200 for head dimensions 64 and 128, derived from
resource counts for others (docs/design/hopper-forward.md).
"""

from dataclasses import replace
from math import gcd
from typing import NamedTuple

from ...call.call import NO_FEATURES
from ...call.device import Device
from ...call.problem import Problem
from ...call.window import UNLIMITED, Window
from ...expression import Formula
from ...expression.scaling import is_head_factor
from ..gpu.archive import compiler_version
from .listed import expects_lists, is_padded
from .tile_config import (
    MMA_M,
    DkdvConfig,
    DqConfig,
    ForwardConfig,
    FusedBackwardConfig,
    HeadDim,
    LateDq,
    SplitBackwardConfig,
    TileConfig,
)
from .tile_times import TimedConfig, fastest
from .widths import ONE_BOX, widths

MIN_KEYS_3WG = 1024  # keys per row from which three warpgroups are faster with masks, and in packed calls
KEYS_1WG = 2048  # keys per row from which programs of one warpgroup, which read keys most often, are slower if packed
NEWEST_3WG = (3, 7)  # version of Triton; with later ones, three warpgroups are 4 to 7% slower at head dimension 96
NEWEST_LATE_DQ = (3, 6)  # version of Triton; with 3.9, adding dq late spills 192 bytes at head dimension 128, not 72
IN_ORDER_MIN_KEYS = 8192  # from which accumulating dq in order is faster than in any order
# Rows, the same. Plans know powers of two: 8192 stands for 4608 as well, which an order makes slower.
IN_ORDER_MIN_ROWS = 2**14
IN_ORDER_MIN_ROWS_64 = 2**15  # up to head dimension 64, where of fewer rows several heads share the L2 cache

# Boxes of 64 columns are loaded faster than narrower ones, which leave room for more stages.
D32, D64, D80, D96 = HeadDim((32,), 32), HeadDim((64,), 64), HeadDim((64, 16), 64), HeadDim((64, 32), 64)
D128, D192, D256 = HeadDim((128,), 128), HeadDim((128, 64), 64), HeadDim((256,), 256)
D80_NARROW, D96_NARROW, D160_NARROW = (HeadDim(x, 32) for x in ((64, 16), (64, 32), (128, 32)))
# Keys: widths for q and v. Fields: these, epilogue_columns, block_n, num_warpgroups, stages.
TWO_WARPGROUPS = {
    (32, 32): ForwardConfig(D32, D32, 32, 128, 2, 4),
    (64, 64): ForwardConfig(D64, D64, 64, 128, 2, 4),
    (80, 80): ForwardConfig(D80, D80, 128, 128, 2, 2),
    (96, 96): ForwardConfig(D96, D96, 128, 128, 2, 2),
    (128, 128): ForwardConfig(D128, D128, 128, 128, 2, 2),
    (192, 128): ForwardConfig(D192, D128, 64, 128, 2, 2, q_stages=1),
    (160, 160): ForwardConfig(D160_NARROW, D160_NARROW, 64, 128, 2, 2, q_stages=1, speculative_exps=8),
    (192, 192): ForwardConfig(D192, D192, 128, 64, 2, 3, q_stages=1, speculative_exps=12),
    (256, 256): ForwardConfig(D256, D256, 128, 64, 2, 2, q_stages=1, speculative_exps=12),
}
# Three warpgroups read keys less often, waste more rows at the end, and have no registers for speculative values.
THREE_WARPGROUPS = {
    (32, 32): ForwardConfig(D32, D32, 32, 128, 3, 4, 160, 32, speculative_exps=0),
    (64, 64): ForwardConfig(D64, D64, 64, 128, 3, 4, 160, 32, speculative_exps=0),
    (80, 80): ForwardConfig(D80_NARROW, D80_NARROW, 64, 64, 3, 4, 160, 32, speculative_exps=0),
    (96, 96): ForwardConfig(D96_NARROW, D96_NARROW, 64, 64, 3, 4, 160, 32, speculative_exps=0),
}


# Programs of one warpgroup share a core and fill each other's gaps. Each reads keys of its own, in short blocks.
ONE_WARPGROUP = {
    (32, 32): ForwardConfig(D32, D32, 32, 64, 1, 3, speculative_exps=0, programs_per_core=4),
    (64, 64): ForwardConfig(D64, D64, 64, 64, 1, 3, speculative_exps=0, programs_per_core=3),
    (128, 128): ForwardConfig(D128, D128, 64, 64, 1, 2, speculative_exps=0, programs_per_core=2),
}
# Of so few tiles that all run at once: two programs of a core, and half as many steps, of which each waits for keys.
FEW_1WG = replace(ONE_WARPGROUP[64, 64], block_n=128, stages=2, programs_per_core=2)
FEW_1WG_KEYS = 512  # from which they were measured (docs/journal/2026-11-26-odd-shapes.md)
# Three warpgroups with 64 keys, of which short calls waste fewer.
SHORT_3WG = {
    (64, 64): replace(THREE_WARPGROUPS[64, 64], block_n=64),
    (128, 128): ForwardConfig(D128, D128, 64, 64, 3, 4, 160, 32, q_stages=1, speculative_exps=0),
}
# Tiles of dense calls, measured on an H100 (docs/journal/2026-11-25-short-rows.md, -programs.md, -requests.md).
TIMED = {
    (32, 32): (
        TimedConfig(TWO_WARPGROUPS[32, 32]),
        TimedConfig(THREE_WARPGROUPS[32, 32], 0.82),
        TimedConfig(ONE_WARPGROUP[32, 32], 0.84, 240),
    ),
    (64, 64): (
        TimedConfig(TWO_WARPGROUPS[64, 64]),
        TimedConfig(THREE_WARPGROUPS[64, 64], 0.8),
        TimedConfig(SHORT_3WG[64, 64], 0.99, 192),
        TimedConfig(ONE_WARPGROUP[64, 64], 0.97, 225),
    ),
    (80, 80): (TimedConfig(TWO_WARPGROUPS[80, 80]), TimedConfig(THREE_WARPGROUPS[80, 80], 0.91)),
    (96, 96): (TimedConfig(TWO_WARPGROUPS[96, 96]), TimedConfig(THREE_WARPGROUPS[96, 96], 0.91)),
    (128, 128): (
        TimedConfig(TWO_WARPGROUPS[128, 128]),
        TimedConfig(SHORT_3WG[128, 128], long=0.965),
        TimedConfig(ONE_WARPGROUP[128, 128], 1.5, 200),
    ),
}
FUSED_BACKWARD = {
    32: FusedBackwardConfig(D32, 128, 2, 240, 24, early_half_exps=True),
    64: FusedBackwardConfig(D64, 128, 2, 240, 24, early_half_exps=True),
    80: FusedBackwardConfig(D80, 64, 2, 240, 24, early_half_exps=False),
    96: FusedBackwardConfig(D96, 64, 2, 240, 24, early_half_exps=False),
    128: FusedBackwardConfig(D128, 64, 2, 240, 24, early_half_exps=False),
}


# Widths whose products leave registers for late dq, and for left operands. At 96 one warpgroup has more of dq.
LATE_DQ = {80: LateDq(3, values=(2, 2)), 96: LateDq(3, values=(1, 2)), 128: LateDq(2)}
# Blocks of 64 rows leave registers for late dq and for the keys: up to 20% faster.
LATE_64 = FusedBackwardConfig(D64, 64, 3, 240, 24, early_half_exps=True, late_dq=LateDq(3, keys=(1, 1), values=(1, 1)))
LATE_64_LENGTH, LATE_64_RATIO = 256, 4
# Sums of dq for which the L2 cache has room. Of more, those of two blocks of keys are a large part of a call.
LATE_64_KEYS, LATE_64_BYTES = 256, 16 * 2**20


class BiasStages(NamedTuple):
    """Stages of the forward kernel for tiles of a bias, and what they leave for keys and values and for queries."""

    bias: int
    keys: int
    queries: int


# By warpgroups and width, where shared memory has room for tiles of 16-bit biases.
FORWARD_BIAS_STAGES = {
    (1, 32): BiasStages(2, 3, 2),
    (1, 64): BiasStages(2, 2, 1),
    (2, 32): BiasStages(2, 4, 2),
    (2, 64): BiasStages(2, 3, 2),
    (2, 80): BiasStages(1, 2, 1),
    (2, 96): BiasStages(1, 2, 1),
    (2, 128): BiasStages(1, 2, 1),
}
BACKWARD_BIAS_STAGES = {32: 1, 64: 1, 80: 1, 96: 1, 128: 1}
SPLIT_BACKWARD = {
    (192, 128): SplitBackwardConfig(DqConfig(D192, D128, kv_stages=6), DkdvConfig(D192, D128, stages=3)),
    (160, 160): SplitBackwardConfig(
        DqConfig(D160_NARROW, D160_NARROW, kv_stages=7), DkdvConfig(D160_NARROW, D160_NARROW, stages=3)
    ),
    (192, 192): SplitBackwardConfig(DqConfig(D192, D192, kv_stages=5), DkdvConfig(D192, D192, stages=2)),
    (256, 256): SplitBackwardConfig(DqConfig(D256, D256, kv_stages=3), DkdvConfig(D256, D256, stages=2)),
}
# Left operands in registers, of which plain calls leave enough: up to 5% faster with Triton 3.6. With 3.9, dq spills
# 752 bytes (docs/journal/2026-11-26-backward-operands.md).
PLAIN_SPLIT_BACKWARD = {
    (192, 192): SplitBackwardConfig(
        DqConfig(D192, D192, kv_stages=5, dout_in_registers=True),
        DkdvConfig(D192, D192, stages=3, keys_in_registers=True),
    ),
}


def tile_config(problem: Problem, device: Device) -> TileConfig:
    """Configurations for a problem."""
    width = widths(problem)
    assert width is not None  # `support` declines others
    warpgroups = warpgroups_with_room(problem, device, width)
    if problem.layout == "dense" and width in TIMED and not is_masked(problem):
        forward = fastest(problem, device, [x for x in TIMED[width] if x.config.num_warpgroups in warpgroups])
        forward = FEW_1WG if forward == ONE_WARPGROUP[64, 64] and has_few_tiles(problem, device) else forward
    elif 1 in warpgroups and width in ONE_BOX and problem.pages is None and keys_per_row(problem) < KEYS_1WG:
        forward = ONE_WARPGROUP[width]
    else:
        three = 3 in warpgroups and width in THREE_WARPGROUPS and keys_per_row(problem) >= min_keys_3wg(problem)
        forward = (THREE_WARPGROUPS if three else TWO_WARPGROUPS)[width]
    return TileConfig(with_pages(forward, problem), backward_config(problem, device, width))


def has_few_tiles(problem: Problem, device: Device) -> bool:
    """Whether each core has at most two tiles of a warpgroup's rows, in plain calls."""
    batch, rows, keys = problem.counts
    plain = is_plain(problem) and problem.window.unlimited
    tiles = batch * problem.num_heads_q * -(-rows // MMA_M)
    return plain and keys > FEW_1WG_KEYS and tiles <= FEW_1WG.programs_per_core * device.cores


def forward_config(width: tuple[int, int], num_warpgroups: int) -> ForwardConfig:
    """The configuration of a width with a number of warpgroups."""
    timed = (x.config for x in TIMED.get(width, ()) if x.config.num_warpgroups == num_warpgroups)
    return next(timed, TWO_WARPGROUPS[width])


def is_masked(problem: Problem) -> bool:
    """Whether a mask hides pairs, besides the window."""
    return problem.features.mask is not None or problem.mask_mod is not None


def is_plain(problem: Problem) -> bool:
    """Whether nothing but a window changes scores."""
    changed = problem.softcap or problem.dropout or problem.score_mod is not None
    return problem.features == NO_FEATURES and not changed and not is_masked(problem)


def warpgroups_with_room(problem: Problem, device: Device, width: tuple[int, int]) -> tuple[int, ...]:
    """Numbers of a program's warpgroups that have registers for what the problem does with scores."""
    score_mod, masked = problem.score_mod, is_masked(problem)
    costly = score_mod is not None and not (isinstance(score_mod, Formula) and is_head_factor(score_mod))
    # Three warpgroups take 0.92 of the time with padding, 0.97 to 1.05 with documents, 1.23 with a narrow window.
    other_mask = masked and not is_padded(problem)
    other_terms = problem.features._replace(bias=None).score_terms
    if problem.softcap or costly or other_mask:
        return (2,)
    one = () if masked else (1,)
    if problem.features.bias is not None:
        short = width == ONE_BOX[0] or keys_per_row(problem) < KEYS_1WG
        return (*one, 2) if width in ONE_BOX and short and not other_terms and not problem.dropout else (2,)
    if other_terms or problem.dropout:
        return (*one, 2) if width in ONE_BOX else (2,)
    if masked:  # with lists, wider ones spill registers
        short = (1,) if keys_per_row(problem) < MIN_KEYS_3WG else ()
        return (*short, 2, 3) if width in ONE_BOX else (2,)
    fits = width in ONE_BOX or (compiler_version(device.arch) or NEWEST_3WG) <= NEWEST_3WG
    return (*one, 2, 3) if fits else (*one, 2)


def with_pages(config: ForwardConfig, problem: Problem) -> ForwardConfig:
    """The configuration for keys in pages, if they are: each part of a block lies in one page."""
    if problem.pages is None:
        return config
    size = problem.pages.size if problem.pages.several else None
    rows = config.block_n if size is None else gcd(size, config.block_n)
    return replace(config, page_rows=rows, page_size=size)


def min_keys_3wg(problem: Problem) -> int:
    """Keys per row from which three warpgroups are faster: twice as many with masks on both sides, and at widths of two
    chunks with any mask.
    """
    masked = problem.window.left is not None if widths(problem) in ONE_BOX else not problem.window.unlimited
    return 2 * MIN_KEYS_3WG if masked else MIN_KEYS_3WG


def backward_config(
    problem: Problem, device: Device, width: tuple[int, int]
) -> FusedBackwardConfig | SplitBackwardConfig:
    """Configuration of the backward pass of kernels of this width."""
    if width in SPLIT_BACKWARD:
        plain = is_plain(problem) and not has_newer_compiler(device)
        return (SPLIT_BACKWARD | (PLAIN_SPLIT_BACKWARD if plain else {}))[width]
    config = FUSED_BACKWARD[width[0]]
    limited = not problem.window.unlimited
    # A mask function shows each block of keys other rows, as a diagonal does.
    # Without a diagonal, an order keeps programs in step: they read the same rows from the L2 cache. Adding late is
    # faster than that (docs/journal/2026-11-26-backward-queues.md).
    min_rows = IN_ORDER_MIN_ROWS_64 if width in ONE_BOX else IN_ORDER_MIN_ROWS
    long = problem.seqlen_q >= min_rows and problem.seqlen_k >= IN_ORDER_MIN_KEYS
    late_dq = not problem.deterministic and may_add_late(problem, device, width)
    if late_dq and width == (64, 64):
        return replace(LATE_64, lpt=limited)
    in_order = problem.deterministic or (long and not late_dq and not limited and problem.mask_mod is None)
    # Blocks in lists differ in length by the mask. Last keys first, each of them begins with its own diagonal, and none
    # waits for the first one to store its dq.
    lpt = limited and (not in_order or config.block_m < config.block_n) and not expects_lists(problem)
    return replace(config, lpt=lpt, in_order=in_order, late_dq=LATE_DQ[width[0]] if late_dq else None)


def may_add_late(problem: Problem, device: Device, width: tuple[int, int]) -> bool:
    """Whether warpgroups may add dq themselves, one step late, if the call is long: in plain calls at widths whose
    products leave registers, at 128 few. At 64 features, whether they do.
    """
    batch, rows, keys = problem.counts
    few_registers = width == (128, 128) and has_newer_compiler(device)
    fits = width != ONE_BOX[0] and problem.window in (UNLIMITED, Window(right=0)) and not few_registers
    if width == (64, 64):  # measured there; of few rows, many programs would add to the same sums
        fits = fits and min(rows, keys) >= LATE_64_LENGTH and max(rows, keys) <= LATE_64_RATIO * min(rows, keys)
        fits = fits and (keys > LATE_64_KEYS or batch * problem.num_heads_q * rows * 64 * 4 <= LATE_64_BYTES)
    return problem.layout == "dense" and is_plain(problem) and fits


def has_newer_compiler(device: Device) -> bool:
    """Whether the kernels' Triton is newer than the one with which kernels of many registers were measured."""
    return (compiler_version(device.arch) or NEWEST_LATE_DQ) > NEWEST_LATE_DQ


def max_blocks(tokens: int, block: int, batch: int) -> int:
    """Upper bound of the blocks of packed sequences.

    Each sequence begins with a block of its own, and tokens outside all sequences count as one more sequence.
    """
    return tokens // block + batch + 1


def keys_per_row(problem: Problem) -> int:
    """Approximate number of keys that a row sees."""
    window = problem.window
    keys = problem.seqlen_k
    if window.right is not None or window.top_left:
        keys //= 2
    if window.left is not None:
        keys = min(keys, window.left + 1 + (keys if window.right is None else window.right))
    return keys
