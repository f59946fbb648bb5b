"""Numbers of programs that share the keys of few rows or the rows of few keys, and of accumulators of dq.

With few rows or keys, tiles alone leave cores idle, and programs of the backward pass wait for the same rows of dq.
"""

from ...call.device import Device
from ...call.problem import Problem
from .listed import expects_lists
from .split_times import cdiv, divisors, fastest, time
from .tables import keys_per_row
from .tile_config import DkdvConfig, ForwardConfig, FusedBackwardConfig

ROW_SPLIT_GAIN = 1.05  # for which programs read other rows at the same time, which the L2 cache may not hold
MAX_DQ_PARTS = 16
MAX_CHUNK_ROWS = 2**16  # of a launch, in which programs stay close enough to each other to share the L2 cache
UNEVEN = 0.9  # time of the longest tile of keys, in units of all tiles spread over all cores, from which it is split
NEARLY_EVEN = 1.1  # the same, with which splits of heads alone will do
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
    return fastest(tiles, blocks, bytes_per_split, device.cores)


def dq_parts(problem: Problem, device: Device, config: FusedBackwardConfig) -> int:
    """Accumulators of dq, enough that programs that add in order seldom wait for the same rows."""
    if problem.layout != "dense" or not config.in_order:
        return 1
    row_blocks = cdiv(problem.seqlen_q, config.block_m) * problem.num_heads_q * problem.batch
    tiles = cdiv(problem.seqlen_k, config.block_n) * problem.num_heads_kv * problem.batch * config.splits
    programs = min(device.cores, tiles)
    return max(1, min(MAX_DQ_PARTS, cdiv(programs, row_blocks)))


def head_splits(problem: Problem, device: Device, config: FusedBackwardConfig) -> int:
    """The number of programs that share the query heads of a block of keys.

    Each has rows of dq of its own, so that programs keep the order in which they add to them.
    """
    if problem.layout != "dense" or problem.window.unlimited:
        return 1
    group = problem.num_heads_q // problem.num_heads_kv
    choices = divisors(group)
    even = (n for n in choices if not uneven(problem, device, config, n, UNEVEN))
    return next(even, 1 if uneven(problem, device, config, group, NEARLY_EVEN) else group)


def dkdv_head_splits(problem: Problem, device: Device, config: DkdvConfig) -> int:
    """As `head_splits`, for the kernel of dk and dv alone; also where full tiles do not fill the device evenly."""
    group = problem.num_heads_q // problem.num_heads_kv
    if problem.layout != "dense" or group == 1:
        return 1
    choices = divisors(group)
    if not problem.window.unlimited:
        return next((n for n in choices if not uneven(problem, device, config, n, NEARLY_EVEN)), group)
    keys = problem.seqlen_k * problem.num_heads_kv * problem.batch
    tiles = cdiv(problem.seqlen_k, config.block_n) * problem.num_heads_kv * problem.batch
    blocks = cdiv(problem.seqlen_q, config.block_m) * group
    bytes_per_split = keys * (problem.head_dim + problem.head_dim_v) * 8
    return min(choices, key=lambda n: time(n, tiles, blocks, bytes_per_split, device.cores))


def row_splits(problem: Problem, device: Device, config: FusedBackwardConfig) -> int:
    """The number of programs that share the rows of a block of keys."""
    if problem.layout != "dense":
        return 1
    m_blocks = cdiv(problem.seqlen_q, config.block_m)
    if not problem.window.unlimited:
        # Few splits break the order in which they add dq, and are slower than none (docs/journal).
        too_long = m_blocks >= MIN_UNEVEN_BLOCKS and uneven(problem, device, config, config.head_splits, NEARLY_EVEN)
        return min(MAX_UNEVEN_SPLITS, m_blocks // 2) if too_long else 1
    tiles = cdiv(problem.seqlen_k, config.block_n) * problem.num_heads_kv * problem.batch
    blocks = m_blocks * (problem.num_heads_q // problem.num_heads_kv)
    keys = problem.seqlen_k * problem.num_heads_kv * problem.batch
    bytes_per_split = keys * (problem.head_dim + problem.head_dim_v) * 8
    return fastest(tiles, blocks, bytes_per_split, device.cores, ROW_SPLIT_GAIN)


def uneven(
    problem: Problem, device: Device, config: FusedBackwardConfig | DkdvConfig, head_splits: int, limit: float
) -> bool:
    """Whether the longest tile of a diagonal or window takes longer than `limit` times all of them on all cores."""
    m_blocks = cdiv(problem.seqlen_q, config.block_m)
    longest = min(m_blocks, cdiv(rows_per_key(problem) * 2, config.block_m))
    mean = rows_per_key(problem) / config.block_m
    tiles = cdiv(problem.seqlen_k, config.block_n) * problem.num_heads_kv * problem.batch * head_splits
    return longest * device.cores > tiles * mean * limit


def row_chunks(problem: Problem, config: FusedBackwardConfig) -> int:
    """The number of launches among which the rows of a long call are divided."""
    masked = not problem.window.unlimited or problem.mask_mod is not None or problem.features.mask is not None
    if problem.layout != "dense" or masked or not (config.in_order or config.late_dq):
        return 1
    return cdiv(problem.seqlen_q, MAX_CHUNK_ROWS)


def rows_per_key(problem: Problem) -> int:
    """Approximate number of rows that see a key."""
    return max(1, problem.seqlen_q * keys_per_row(problem) // max(problem.seqlen_k, 1))
