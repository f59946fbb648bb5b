"""Tiles and splits of few rows: decoding, speculative decoding, and sequences of one small tile.

The query heads of a group are the rows of one tile (`backend/gpu/decoding.py`), and several programs share its keys.
"""

import math

from ...call.device import Device
from ...call.problem import Problem, power_of_two
from ..gpu.decoding import MAX_ROWS, group_of, is_decoding, packed_rows
from .families import MIN_COPY_BYTES, has_most, has_pairs, misaligned, needs_room
from .tile_config import KernelConfig, TileConfig, WidthConfigs

KEYS_TIMES_WIDTH, FEW = 8192, 16  # of a tile that decodes; rows above which products take time too
FEW_SPLITS = 4  # up to which several programs of a core share a row; merging more takes longer than it gains
TWO_CHUNKS = range(65, 97)  # widths that are held as 64 and 16 or 32 features: more warps have no more to do
MIN_SPLIT_KEYS = 64  # of one split of a row
SHORT = 64  # rows and keys of a sequence that is one small tile


def tiles(row: WidthConfigs, problem: Problem, device: Device) -> TileConfig:
    """The configurations for few rows; `row` has those of its width."""
    forward, group = forward_tile(row, problem, device), group_of(problem)
    if is_short(problem) and has_most(problem.dtype, device) and not needs_room(problem, device):
        warps = 4 if row.width <= 64 else 8
        short = KernelConfig(SHORT, SHORT, warps, 1)
        return TileConfig(forward._replace(block_n=SHORT, num_stages=1), short, short, pack_gqa=group)
    chosen = for_programs(forward, problem, device)
    given_splits = None if chosen == forward else forward
    return TileConfig(chosen, row.dkdv, row.dq, pack_gqa=group, given_splits=given_splits)


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
    if misaligned(problem, device):
        block_m = min(block_m, shipped_config.block_m)
    if not loads_ahead(problem, device):
        return KernelConfig(block_m, min(shipped_config.block_n, block_n), 4, shipped_config.num_stages)
    if block_m > MAX_ROWS and row.width <= 64:
        block_m = MAX_ROWS
    if FEW < block_m <= MAX_ROWS:
        return KernelConfig(block_m, 64 if row.width <= 128 else max(16, block_n // 2), 4, 3)
    return KernelConfig(block_m, block_n, 4 if block_m <= MAX_ROWS else 8, 4)


def for_programs(chosen: KernelConfig, problem: Problem, device: Device) -> KernelConfig:
    """A better configuration for up to 16 rows where their number of tiles decides it: with more than half a tile for
    each core, smaller ones, of which several run on a core; with fewer, larger blocks of keys, unless pages are smaller
    (H200: docs/journal/2026-11-25-decoding.md).
    """
    p = problem
    if chosen.block_m > FEW or not loads_ahead(p, device):
        return chosen
    narrowest, width = min(p.head_dim, p.head_dim_v), max(p.head_dim, p.head_dim_v)
    programs = num_programs(chosen, group_of(p), p)
    if 2 * programs <= device.cores:
        larger = width <= 128 and narrowest > TWO_CHUNKS[-1] and (p.pages is None or p.pages.size >= 128)
        return KernelConfig(FEW, 128, 4, 3) if larger else chosen
    if width in TWO_CHUNKS:
        return KernelConfig(FEW, 32, 1, 4)
    stages = 4 if programs < device.cores else 3  # H100: 2% each way
    return KernelConfig(FEW, 64, 2, stages) if width <= 64 and programs <= 2 * device.cores else chosen


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
    programs = num_programs(chosen.forward, chosen.pack_gqa, problem)
    together = programs_of_core(chosen.forward, problem, device)
    several = together * device.cores / programs
    # Programs are counted for a batch that is rounded up: Whisper's 100 are 160. Small ones fit four on a core.
    several = round(several) if together > 1 and chosen.forward.num_warps == 2 else int(several)
    wanted = max(device.cores // programs, min(several, FEW_SPLITS))
    most = math.isqrt(problem.seqlen_k) // 4  # merging takes time for each split: 16 are best for 4096 keys of one row
    return max(1, min(wanted, problem.seqlen_k // MIN_SPLIT_KEYS, most))


def programs_of_core(config: KernelConfig, problem: Problem, device: Device) -> int:
    """The programs of few rows that a core should run at once."""
    if not is_decoding(problem) or not loads_ahead(problem, device):
        return 1
    return 2 if FEW < config.block_m <= MAX_ROWS or config.num_warps == 2 else 1
