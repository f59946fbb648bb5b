"""Time of a dense forward pass with some tiles, counted in pairs of rows and keys (docs/design/hopper-forward.md)."""

from collections.abc import Iterable
from math import ceil
from typing import NamedTuple

from ...call.device import Device
from ...call.problem import Problem
from .tile_config import ForwardConfig

MIN_SPLIT_KEYS = 2048  # from which programs share the keys of few rows
COUNTED = 64  # tiles of a head; of more, every second, third, ...
MASKED = 0.55  # of a pair in a block at an edge of the window, besides its time
BYTES = 0.89  # of a byte of q, k, v and the results on each core


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
    times = []
    for n in range(0, blocks, -(-blocks // COUNTED)):
        visited, masked = key_blocks(problem, config, n * config.block_m, rows, keys)
        pairs = config.block_n * (visited * timed.pair + masked * MASKED)
        times.append(config.block_m * (pairs + timed.ends))
    mean = sum(times) / len(times)
    if problem.window.unlimited:  # all tiles are alike, and the last ones leave cores idle
        busiest = mean * (tiles if tiles < 1 and keys >= MIN_SPLIT_KEYS else ceil(tiles))
    else:
        busiest = max(mean * tiles, max(times) * max(1, min(config.programs_per_core, tiles)))
    return max(busiest, BYTES * bytes_per_core(problem, device, rows, keys))


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
