"""Time of a dense forward pass with some tiles, counted in pairs of rows and keys (docs/design/hopper-forward.md)."""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from ...call.device import Device
from ...call.problem import Problem
from .tile_config import MMA_M, ForwardConfig

MIN_SPLIT_KEYS = 2048  # from which programs share the keys of few rows
COUNTED = 64  # tiles of a head; of more, every second, third, ...
MASKED = 0.55  # of a pair in a block at an edge of the window, besides its time
IDLE = 0.26  # of a warpgroup without rows, in units of one with rows
BYTES = 0.89  # of a byte of q, k, v and the results on each core
REQUEST = 14.5  # of a request to the L2 cache for each core
REQUEST_BYTES = 64


class TimedConfig(NamedTuple):
    """A configuration and its time, in units of that of two warpgroups for a pair of a row and a key."""

    config: ForwardConfig
    pair: float = 1.0
    ends: float = 256  # of each row: what a tile takes besides its pairs


class KeyBlocks(NamedTuple):
    """Numbers of blocks of keys that a block of rows visits, and of those at an edge of the window."""

    visited: int
    masked: int


def fastest(problem: Problem, device: Device, candidates: Iterable[TimedConfig]) -> ForwardConfig:
    """The configuration with the least time."""
    return min(candidates, key=lambda timed: time(problem, device, timed)).config


def time(problem: Problem, device: Device, timed: TimedConfig) -> float:
    """Time of the busiest core, also for pairs past the last row and key. Splits of many keys fill the device."""
    config, (rows, keys) = timed.config, problem.fine_lengths or (problem.seqlen_q, problem.seqlen_k)
    blocks = -(-rows // config.block_m)
    tiles = blocks * problem.num_heads_q * problem.batch / device.cores
    times, requests = [], []
    for n in range(blocks - 1, -1, -blocks // COUNTED):
        first = n * config.block_m
        visited, masked = key_blocks(problem, config, first, rows, keys)
        share = share_of_time(min(config.num_warpgroups, -(-(rows - first) // MMA_M)), config)
        pairs = config.block_n * ((1 + (visited - 1) * share) * timed.pair + masked * MASKED)
        times.append(config.block_m * (pairs + timed.ends))
        requests.append(tile_requests(problem, config, visited))
    total = sum(times) / len(times) * tiles
    if problem.window.unlimited:  # tiles are nearly alike, and the last ones leave cores idle
        longest = max(times)
        waves = total / longest if tiles < 1 and keys >= MIN_SPLIT_KEYS else ceil(total / longest)
        busiest = min(waves * longest, total + min(times))
    else:
        busiest = max(total, max(times) * max(1, min(config.programs_per_core, tiles)))
    loads = REQUEST * sum(requests) / len(requests) * tiles
    return max(busiest, loads, BYTES * bytes_per_core(problem, device, rows, keys))


def share_of_time(active: int, config: ForwardConfig) -> float:
    """Time of a step in which some warpgroups have rows, in units of a step in which all have."""
    return IDLE + (1 - IDLE) * active / config.num_warpgroups


def tile_requests(problem: Problem, config: ForwardConfig, visited: int) -> float:
    """Requests to the L2 cache for a tile's rows of q, and of keys and values in the blocks that it visits."""
    q, v = (row_requests(d * problem.dtype.itemsize) for d in (problem.head_dim, problem.head_dim_v))
    return config.block_m * q + visited * config.block_n * (q + v)


def row_requests(size: int) -> float:
    """Requests of TMA for a row of `size` bytes, on the mean of heads that lie side by side: a piece that begins within
    a line of 64 bytes takes two, and within a sector of 32 bytes three.
    """
    alignment = size & -size
    more = 0.0 if alignment >= REQUEST_BYTES else 0.5 if alignment == REQUEST_BYTES // 2 else 1.1
    return -(-size // REQUEST_BYTES) * (1 + more)


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


def bytes_per_core(problem: Problem, device: Device, rows: int, keys: int) -> float:
    """Bytes of q, k, v and the results."""
    elements = problem.num_heads_q * rows + problem.num_heads_kv * keys
    width = problem.head_dim + problem.head_dim_v
    return problem.batch * elements * width * problem.dtype.itemsize / device.cores
