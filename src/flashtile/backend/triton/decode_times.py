"""Time of a decoding call by its tile and splits, counted for an H100 (docs/journal/2026-11-26-decode-plans.md).

A call takes as long as its programs wait for their blocks of keys one after another, in waves of as many as the cores
hold, or as memory takes to deliver all keys. Then the splits of a row are merged.
"""

from math import ceil
from typing import NamedTuple

from ...call.device import Device
from ...call.problem import Problem, power_of_two
from ..gpu.decoding import packed_rows
from .constants import TRANSPOSED_ROWS
from .tile_config import KernelConfig

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
SHARED_BYTES = 227 * 1024  # of a core, for its programs
WARPS = 16  # of a core
# Bytes in a microsecond:
BANDWIDTH = {"H200": 4.8e6, "B200": 8e6, "B300": 8e6}  # of memory, as published, by a part of the device's name
OTHER_BANDWIDTH, ACHIEVED = 3.35e6, 0.88  # of an H100, and the part of it that calls get
CORE_BYTES = 6.6e4  # that a core takes, at most
# Parts of memory's time:
ENOUGH, LATENCY = 1.85, 0.34  # microseconds of bandwidth in flight, and what is lost with none
CROWDED, CROWD = 0.03, 32 * 1024  # where some cores have more programs, for each CROWD bytes in flight above the first
# Microseconds:
START = 1.0  # to the first keys
FILL = 0.18  # of the time of a block, for each stage that is loaded ahead
MERGE, ROUND, CHUNK = 2.4, 0.5, 2.5  # of partial results: once, for each round of rows, and in several chunks of splits
MAX_UNROLL, REGISTERS, MIN_REGISTERS = 16, 64, 4  # of `kernels.combine`: splits at once, and their numbers in a thread
SLACK, UNEVEN_SLACK = 1.02, 1.01  # of the least time, within which plans count as equal
SEVERAL_WAVES = 1.2
OVERLAP = 8  # exponent of a sum that is little more than its largest part
UNEVEN = 0.5  # of a program whose sequence is longer than others, where programs alone leave memory idle


class TimedTile(NamedTuple):
    """A tile of keys, and the time in which a program that has a core alone takes one block: with masks, and without
    them, as in whole rows of one query head.
    """

    block_n: int
    num_warps: int
    num_stages: int
    masked: float
    unmasked: float


FEW, SEVERAL = 16, 64  # rows of a tile
NARROW = TimedTile(32, 1, 4, 0.50, 0.39), TimedTile(64, 2, 3, 0.80, 0.80)
TILES = {  # by rows and width; heads in two chunks, as 40 = 32 + 16 and 80 = 64 + 16, have no more work for more warps
    (TRANSPOSED_ROWS, 48): (TimedTile(64, 2, 3, 0.54, 0.54),),
    (TRANSPOSED_ROWS, 64): (TimedTile(64, 2, 3, 0.34, 0.34), TimedTile(128, 4, 3, 0.35, 0.35)),
    (TRANSPOSED_ROWS, 96): (TimedTile(64, 2, 3, 0.62, 0.62),),
    (TRANSPOSED_ROWS, 128): (TimedTile(64, 4, 3, 0.85, 0.85), TimedTile(128, 4, 3, 1.4, 1.4)),
    (TRANSPOSED_ROWS, 256): (TimedTile(64, 4, 3, 0.97, 0.97),),
    (FEW, 48): NARROW,
    (FEW, 64): (*NARROW, TimedTile(128, 4, 3, 0.95, 0.95)),
    (FEW, 96): (TimedTile(32, 1, 4, 0.65, 0.50), TimedTile(64, 2, 3, 0.90, 0.90)),
    (FEW, 128): (TimedTile(64, 4, 3, 0.88, 0.88), TimedTile(128, 4, 3, 1.2, 1.2)),
    (FEW, 256): (TimedTile(64, 4, 3, 1.1, 1.1),),
    (SEVERAL, 64): (TimedTile(64, 4, 3, 0.70, 0.70),),
    (SEVERAL, 128): (TimedTile(64, 4, 3, 1.07, 1.07), TimedTile(128, 8, 3, 1.91, 1.91)),
}
LONG_BLOCK = 64  # keys of a block that is taken over shorter pages too


class Choice(NamedTuple):
    config: KernelConfig
    splits: int


def fastest(problem: Problem, device: Device, block_m: int) -> Choice | None:
    """The choice among those that take at most SLACK times the least time; `None` for tiles that were not measured.

    It has the most splits that leave one program to a core, or else the fewest, and the smallest tile, or in several
    waves the largest.
    """
    times = {
        Choice(KernelConfig(block_m, *tile[:3]), splits): time(problem, device, block_m, tile, splits)
        for tile in tiles(problem, block_m)
        for splits in SPLITS
    }
    limit = min(times.values(), default=0.0) * (UNEVEN_SLACK if is_uneven(problem) else SLACK)
    best = [choice for choice in times if times[choice] <= limit]
    count, all_splits = num_tiles(problem, block_m), {choice.splits for choice in best}
    alone = [n for n in all_splits if n * count <= device.cores]
    splits = max(alone) if alone else min(all_splits, default=1)
    found = sorted(choice.config for choice in best if choice.splits == splits)
    if not found:
        return None
    waves = count * splits / (device.cores * programs_of_core(problem, block_m, found[0]))
    return Choice(found[-1 if waves > SEVERAL_WAVES else 0], splits)


def tiles(problem: Problem, block_m: int) -> tuple[TimedTile, ...]:
    """The tiles that were measured for a problem's width, whose blocks are not longer than its pages. One warp lacks
    registers for the addresses of pages over 64 features (Triton 3.6: 72 bytes of spills a thread).
    """
    width = max(problem.head_dim, problem.head_dim_v)
    found = next((found for most, found in TILES.items() if block_m <= most[0] and width <= most[1]), ())
    pages = problem.pages
    longest = pages.size if pages is not None and pages.several else problem.seqlen_k
    least_warps = 2 if is_uneven(problem) and width > 64 else 1
    return tuple(tile for tile in found if tile.block_n <= max(longest, LONG_BLOCK) and tile.num_warps >= least_warps)


def is_uneven(problem: Problem) -> bool:
    """Whether sequences have several pages, which they have because their lengths differ."""
    return problem.pages is not None and problem.pages.several


def num_tiles(problem: Problem, block_m: int) -> int:
    """Tiles of rows, each of one program or of several that share its keys."""
    return max(1, row_blocks(problem, block_m) * problem.num_heads_kv * problem.batch)


def row_blocks(problem: Problem, block_m: int) -> int:
    """Tiles of rows that read the same keys."""
    return ceil(packed_rows(problem) / block_m)


def visible_keys(problem: Problem) -> int:
    """Keys that the rows of a sequence see, at most."""
    window, keys = problem.window, problem.seqlen_k
    if window.left is not None:
        keys = min(keys, max(window.left, 0) + problem.seqlen_q)
    return keys if window.chunk is None else min(keys, window.chunk + problem.seqlen_q)


def time(problem: Problem, device: Device, block_m: int, tile: TimedTile, splits: int) -> float:
    """Microseconds of a call, without its launch."""
    p, keys = problem, visible_keys(problem)
    bandwidth = ACHIEVED * next((x for name, x in BANDWIDTH.items() if name in device.name), OTHER_BANDWIDTH)
    programs = num_tiles(p, block_m) * splits
    whole_rows = splits == 1 and packed_rows(p) == p.seqlen_q
    block = tile.unmasked if whole_rows else tile.masked
    edge = keys < p.seqlen_k  # windows begin within a block
    blocks = ceil((ceil((keys - edge) / tile.block_n) + edge) / splits)
    row_bytes = (p.head_dim + p.head_dim_v) * p.dtype.itemsize
    own_bytes = min(blocks * tile.block_n, keys) * row_bytes

    at_once = device.cores * programs_of_core(p, block_m, tile)
    own_time = ceil(programs / at_once) * (blocks + FILL * (tile.num_stages - 1)) * block

    most = ceil(programs / device.cores)  # programs of a core
    ahead = (tile.num_stages - 1) * tile.block_n * row_bytes  # bytes in flight, of a program
    in_flight = min(programs, at_once) * ahead / bandwidth
    lost = LATENCY * max(0.0, 1 - in_flight / ENOUGH)
    if most > 1:
        lost += CROWDED * (most * device.cores / programs - 1) * max(0.0, ahead / CROWD - 1)
    memory_time = programs / row_blocks(p, block_m) * own_bytes / bandwidth * (1 + lost)

    times = own_time, memory_time, most * own_bytes / CORE_BYTES
    total = START + sum(x**OVERLAP for x in times) ** (1 / OVERLAP)
    if is_uneven(p):
        filling = bandwidth * block / (tile.block_n * row_bytes)  # programs that keep memory busy
        total += UNEVEN * min(1, filling / programs) * blocks * block
    return total + merge_time(p, block_m, tile, splits)


def programs_of_core(problem: Problem, block_m: int, tile: TimedTile | KernelConfig) -> int:
    """The programs that a core runs at once."""
    width = problem.head_dim + problem.head_dim_v
    keys = (tile.num_stages - 1) * tile.block_n * width
    shared = (keys + block_m * (problem.head_dim + tile.block_n)) * problem.dtype.itemsize
    return max(1, min(SHARED_BYTES // (shared + 1024), WARPS // tile.num_warps))


def merge_time(problem: Problem, block_m: int, tile: TimedTile, splits: int) -> float:
    """Microseconds of the last program of a tile, which merges all splits (`kernels.combine`)."""
    if splits == 1:
        return 0.0
    chunks = ceil(splits / MAX_UNROLL)
    numbers = 32 * tile.num_warps * max(MIN_REGISTERS, REGISTERS // power_of_two(min(splits, MAX_UNROLL)))
    rows = max(1, numbers // power_of_two(problem.head_dim_v))
    rounds = ceil(min(packed_rows(problem), block_m) / rows)
    return MERGE + rounds * (ROUND if chunks == 1 else CHUNK * chunks)
