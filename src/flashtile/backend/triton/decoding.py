"""Tiles and splits of few rows: decoding, speculative decoding, and sequences of one small tile.

The query heads of a group are the rows of one tile (`backend/gpu/decoding.py`), and several programs share its keys.
"""

import math

from ...call.device import Device
from ...call.problem import Problem, power_of_two
from ..gpu.decoding import MAX_ROWS, group_of, is_decoding, packed_rows
from . import decode_times
from .constants import TRANSPOSED_ROWS
from .families import MIN_COPY_BYTES, has_most, has_pairs, misaligned, needs_room
from .tile_config import KernelConfig, TileConfig, WidthConfigs

KEYS_TIMES_WIDTH, FEW = 8192, 16  # of a tile that decodes; rows above which products take time too
MAX_TRANSPOSED = 256  # features with which tiles of 8 rows were measured
FEW_SPLITS = 4  # up to which two programs of a core share a row
MIN_SPLIT_KEYS = 64  # of one split of a row
SHORT = 64  # rows and keys of a sequence that is one small tile


def tiles(row: WidthConfigs, problem: Problem, device: Device) -> TileConfig:
    """The configurations for few rows; `row` has those of its width."""
    forward, group = forward_tile(row, problem, device), group_of(problem)
    if is_short(problem) and has_most(problem.dtype, device) and not needs_room(problem, device):
        warps = 4 if row.width <= 64 else 8
        short = KernelConfig(SHORT, SHORT, warps, 1)
        forward = forward._replace(block_m=max(16, forward.block_m), block_n=SHORT, num_stages=1)
        return TileConfig(forward, short, short, pack_gqa=group)
    found = decode_times.fastest(problem, device, forward.block_m) if is_timed(problem, device) else None
    if found is None or found.config == forward:
        return TileConfig(forward, row.dkdv, row.dq, pack_gqa=group)
    return TileConfig(found.config, row.dkdv, row.dq, pack_gqa=group, given_splits=forward)


def is_short(problem: Problem) -> bool:
    """Whether a sequence is one small tile: nothing is loaded ahead, and what several stages would take of the shared
    memory lets more programs run on a core.
    """
    p = problem
    narrow = max(p.head_dim, p.head_dim_v) <= 128
    return p.layout == "dense" and p.seqlen_q > 1 and max(p.seqlen_q, p.seqlen_k) <= SHORT and narrow


def forward_tile(row: WidthConfigs, problem: Problem, device: Device) -> KernelConfig:
    """The configuration for few rows, whatever the batch and the lengths: with a given number of splits, a sequence's
    bits depend neither on the batch nor on the longest sequence in it.

    Loading keys is all the work. With the most shared memory, and no feature that needs it, three blocks of keys and
    values are in flight while one is used. With more rows, smaller tiles let two programs run on a core (H200:
    docs/journal/2026-11-25-decoding.md).
    """
    shipped_config, block_n = row.forward, max(16, KEYS_TIMES_WIDTH // row.width)
    block_m = max(16, power_of_two(packed_rows(problem)))
    if packed_rows(problem) <= TRANSPOSED_ROWS and row.width <= MAX_TRANSPOSED and loads_ahead(problem, device):
        block_m = TRANSPOSED_ROWS
    if misaligned(problem, device):
        block_m = min(block_m, shipped_config.block_m)
    if not loads_ahead(problem, device):
        return KernelConfig(block_m, min(shipped_config.block_n, block_n), 4, shipped_config.num_stages)
    if block_m > MAX_ROWS and row.width <= 64:
        block_m = MAX_ROWS
    if FEW < block_m <= MAX_ROWS:
        return KernelConfig(block_m, 64 if row.width <= 128 else max(16, block_n // 2), 4, 3)
    return KernelConfig(block_m, block_n, 4 if block_m <= MAX_ROWS else 8, 4)


def is_timed(problem: Problem, device: Device) -> bool:
    """Whether `decode_times` counts the time of a call of few rows."""
    return is_decoding(problem) and loads_ahead(problem, device)


def loads_ahead(problem: Problem, device: Device) -> bool:
    """Whether a tile of few rows has the shared memory for several blocks of keys, copied asynchronously whatever their
    address.
    """
    widths = problem.head_dim, problem.head_dim_v
    asynchronous = all(n * problem.dtype.itemsize % MIN_COPY_BYTES == 0 for n in widths)
    return has_most(problem.dtype, device) and asynchronous and not (has_pairs(problem) or problem.dropout)


def num_programs(config: KernelConfig, pack_gqa: int, problem: Problem) -> int:
    """The tiles of rows of a call."""
    blocks = -(-max(problem.seqlen_q, 1) * pack_gqa // config.block_m)
    return max(1, blocks * problem.num_heads_q // pack_gqa * problem.batch)


def num_splits(chosen: TileConfig, problem: Problem, device: Device) -> int:
    """The number of programs that share the keys of a row, so that few rows still fill the chip."""
    if is_timed(problem, device):
        found = decode_times.fastest(problem, device, chosen.forward.block_m)
        if found is not None and found.config == chosen.forward:
            return found.splits
    programs = num_programs(chosen.forward, chosen.pack_gqa, problem)
    two_of_core = is_timed(problem, device) and FEW < chosen.forward.block_m <= MAX_ROWS
    several = min(2 * device.cores // programs, FEW_SPLITS) if two_of_core else 0
    most = math.isqrt(problem.seqlen_k) // 4  # merging takes time for each split: 16 are best for 4096 keys of one row
    return max(1, min(max(device.cores // programs, several), problem.seqlen_k // MIN_SPLIT_KEYS, most))
