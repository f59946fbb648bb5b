"""Numbers of programs that share the keys of few rows or the rows of few keys, and of accumulators of dq.

With few rows or keys, tiles alone leave cores idle, and programs of the backward pass wait for the same rows of dq.
"""

from ...call.device import Device
from ...call.problem import Problem
from .head_splits import uneven_heads
from .listed import expects_lists
from .split_times import Tiles, cdiv, key_tiles
from .tables import keys_per_row
from .tile_config import ForwardConfig, FusedBackwardConfig

ROW_SPLIT_GAIN = 1.05  # for which programs read other rows at the same time, which the L2 cache may not hold
MAX_DQ_PARTS = 16
MAX_CHUNK_ROWS = 2**16  # of a launch, in which programs stay close enough to each other to share the L2 cache
MIN_UNEVEN_BLOCKS, MAX_UNEVEN_SPLITS = 16, 16  # blocks of rows, and splits of them


def num_splits(problem: Problem, device: Device, config: ForwardConfig) -> int:
    """The number of programs that share the keys of a tile of rows, of dense queries. Where tiles fill the device, it
    is one with lists of blocks, which parts of tiles have not, and where the last wave alone is divided.
    """
    if problem.layout == "varlen":
        return 1
    rows = problem.seqlen_q * problem.num_heads_q * problem.batch
    tiles = cdiv(problem.seqlen_q, config.block_m) * problem.num_heads_q * problem.batch
    if tiles >= device.cores and (expects_lists(problem) or config.divides_last_wave):
        return 1
    blocks = cdiv(keys_per_row(problem), config.block_n)
    bytes_per_split = rows * problem.head_dim_v * 8  # written and read, in fp32
    return Tiles(tiles, blocks, bytes_per_split).fastest(device.cores)


def dq_parts(problem: Problem, device: Device, config: FusedBackwardConfig) -> int:
    """Accumulators of dq, enough that programs that add in order seldom wait for the same rows."""
    if problem.layout != "dense" or not config.in_order:
        return 1
    row_blocks = cdiv(problem.seqlen_q, config.block_m) * problem.num_heads_q * problem.batch
    programs = min(device.cores, key_tiles(problem, config).count * config.splits)
    return max(1, min(MAX_DQ_PARTS, cdiv(programs, row_blocks)))


def row_splits(problem: Problem, device: Device, config: FusedBackwardConfig) -> int:
    """The number of programs that share the rows of a block of keys: where splits of heads alone leave tiles uneven."""
    if problem.layout != "dense":
        return 1
    if problem.window.unlimited:
        return key_tiles(problem, config).fastest(device.cores, ROW_SPLIT_GAIN)
    # Few splits break the order in which they add dq, and are slower than none (docs/journal).
    m_blocks = cdiv(problem.seqlen_q, config.block_m)
    too_long = m_blocks >= MIN_UNEVEN_BLOCKS and uneven_heads(problem, device, config)
    return min(MAX_UNEVEN_SPLITS, m_blocks // 2) if too_long else 1


def row_chunks(problem: Problem, config: FusedBackwardConfig) -> int:
    """The number of launches among which the rows of a long call are divided."""
    masked = not problem.window.unlimited or problem.mask_mod is not None or problem.features.mask is not None
    if problem.layout != "dense" or masked or not (config.in_order or config.late_dq):
        return 1
    return cdiv(problem.seqlen_q, MAX_CHUNK_ROWS)
