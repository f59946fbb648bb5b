"""Time of a dense forward pass with some tiles, counted in pairs of rows and keys (docs/design/hopper-forward.md)."""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from ...call.device import Device
from ...call.problem import Problem
from .row_wave import is_divisible, row_wave
from .tile_config import MMA_M, ForwardConfig

MIN_SPLIT_KEYS = 2048  # from which programs share the keys of few rows
COUNTED = 64  # tiles of a head; of more, every second, third, ...
LONG_KEYS = 2**14  # without a window, from which calls run at the power limit
MASKED = 0.55  # of a pair in a block at an edge of the window, besides its time
IDLE = 0.5  # of a step, besides the share of warpgroups that have rows
ALONE, SHARED = 1.4, 0.3  # of a tile of several programs a core with few tiles: of it, and of each tile
BYTES = 0.89  # of a byte of q, k, v and the results on each core, at 64 features
REQUEST = 18.7  # of a request to the L2 cache of each core, at 64 features
SECTOR, LINE = 32, 128  # bytes of the L2 cache
PAIRS = {32: 0.88, 64: 1.0, 80: 1.16, 96: 1.26, 128: 1.29}  # time of a pair by width, in units of that at 64


class TimedConfig(NamedTuple):
    """A configuration and its time, in units of that of two warpgroups for a pair of a row and a key."""

    config: ForwardConfig
    pair: float = 1.0
    ends: float = 256  # of each row: what a tile takes besides its pairs
    long: float = 1.0  # of the pairs of calls that run at the power limit: of more energy or less for each


class KeyBlocks(NamedTuple):
    """Numbers of blocks of keys that a block of rows visits, and of those at an edge of the window."""

    visited: int
    masked: int


def fastest(problem: Problem, device: Device, candidates: Iterable[TimedConfig]) -> ForwardConfig:
    """The configuration with the least time."""
    return min(candidates, key=lambda timed: time(problem, device, timed)).config


def time(problem: Problem, device: Device, timed: TimedConfig) -> float:
    """Time of the busiest core, also for pairs past the last row and key. Splits of many keys fill the device."""
    config, (batch, rows, keys) = timed.config, problem.counts
    blocks = -(-rows // config.block_m)
    tiles = blocks * problem.num_heads_q * batch / device.cores
    times = [
        tile_time(problem, timed, n * config.block_m, rows, keys) for n in range(blocks - 1, -1, -blocks // COUNTED)
    ]
    longest = max(times)
    count = sum(x / longest for x in times) / len(times) * tiles  # in units of the longest: exact where all are alike
    total = count * longest
    if not problem.window.unlimited:
        busiest = max(total, longest * waves(min(config.programs_per_core, tiles), config))
    elif tiles < 1 and keys >= MIN_SPLIT_KEYS:
        busiest = total
    else:  # tiles are nearly alike, and the last ones leave cores idle
        wave = row_wave(config, problem.num_heads_q * batch, rows, keys, device.cores)
        saved = wave.saved if is_divisible(problem) else 0.0
        busiest = min((waves(count, config) - saved) * longest, total + min(times))
    return max(busiest, BYTES / PAIRS[config.head_dim.width] * bytes_per_core(problem, device))


def tile_time(problem: Problem, timed: TimedConfig, first: int, rows: int, keys: int) -> float:
    """Time of the tile of rows from the `first` one on."""
    config = timed.config
    blocks = key_blocks(problem, config, first, rows, keys)
    active = min(config.num_warpgroups, -(-(rows - first) // MMA_M)) if config.skips_steps else config.num_warpgroups
    share = IDLE + (1 - IDLE) * active / config.num_warpgroups  # of all steps but the first
    pair = timed.pair * (timed.long if problem.window.unlimited and keys >= LONG_KEYS else 1)
    pairs = config.block_n * ((1 + (blocks.visited - 1) * share) * pair + blocks.masked * MASKED)
    loads = REQUEST / PAIRS[config.head_dim.width] * tile_requests(problem, config, blocks.visited)
    return max(config.block_m * pairs, loads) + config.block_m * timed.ends


def waves(tiles: float, config: ForwardConfig) -> float:
    """Time of a core's tiles, in units of one of them while others run."""
    whole, rest = divmod(ceil(tiles), config.programs_per_core)
    if config.programs_per_core == 1 or rest == 0:
        return ceil(tiles)
    return whole * config.programs_per_core + ALONE + SHARED * rest


def tile_requests(problem: Problem, config: ForwardConfig, visited: int) -> float:
    """Requests to the L2 cache for a tile's rows of q, and of keys and values in the blocks that it visits."""
    q, v = (row_requests(d * problem.dtype.itemsize) for d in (problem.head_dim, problem.head_dim_v))
    return config.block_m * q + visited * config.block_n * (q + v)


def row_requests(size: int) -> float:
    """Requests of TMA for a row of `size` bytes, where heads or rows lie side by side: more if some begin in the middle
    of a sector of 32 bytes, and if they begin in the middle of a line of 128 bytes.
    """
    if size % SECTOR:
        return 2.2 * (size // LINE) + 3.3
    return 1.25 * -(-size // LINE) if size % LINE else 0.5 * size / LINE


def key_blocks(problem: Problem, config: ForwardConfig, first: int, rows: int, keys: int) -> KeyBlocks:
    """Blocks of keys for the block of rows from the `first` one on."""
    window, size = problem.window, config.block_n
    shift = 0 if window.top_left else keys - rows
    lo, hi, full_lo, full_hi = 0, -(-keys // size), 0, -(-keys // size)
    right = 0 if window.top_left else window.right
    if right is not None:
        full_hi = max(0, min(hi, (first + shift + right + 1) // size))
        hi = max(0, min(hi, -(-(first + config.block_m + shift + right) // size)))
    if window.left is not None:
        lo = min(hi, max(0, (first + shift - window.left) // size))
        full_lo = max(0, -(-(first + config.block_m - 1 + shift - window.left) // size))
    visited = max(1, hi - lo)
    return KeyBlocks(visited, max(0, visited - max(0, full_hi - max(lo, full_lo))))


def bytes_per_core(problem: Problem, device: Device) -> float:
    """Bytes of q, k, v and the results."""
    batch, rows, keys = problem.counts
    elements = problem.num_heads_q * rows + problem.num_heads_kv * keys
    width = problem.head_dim + problem.head_dim_v
    return batch * elements * width * problem.dtype.itemsize / device.cores
