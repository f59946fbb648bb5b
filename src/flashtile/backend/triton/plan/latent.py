"""The ways to run attention over latent rows: keys of 576 features, the first 512 are the values.

Query heads of a group are rows of one tile, and there may be more of them than a tile has: 128 heads are two tiles. An
accumulator of 512 columns fills the registers of 8 warps at 64 rows, and the rows of 16 heads leave one core room for
two or three blocks of keys in flight.
"""

from collections.abc import Iterator

import torch

from ....call.device import Device
from ....call.problem import Problem, power_of_two
from ...gpu.chips import memory_of
from ...gpu.decoding import group_of, packed_rows
from ...gpu.waves import splits_that_fill
from ..tile_config import KernelConfig, TileConfig
from ..words import reads_words
from . import tables
from .cost import programs_of_core
from .families import misaligned

LEAST_WGMMA = 64  # rows of a tile that Hopper's warpgroup products take
# Tiles of 16-bit numbers by shared memory in KiB, then rows; a chip takes the largest that it has room for.
TILES = {
    227: {
        16: ((16, 32, 4, 4), (16, 64, 8, 3)),
        32: ((32, 32, 8, 4), (32, 64, 8, 3)),
        64: ((64, 32, 8, 3), (64, 64, 8, 2)),
    },
    163: {16: ((16, 32, 4, 3), (16, 64, 8, 2)), 32: ((32, 32, 8, 3),), 64: ((64, 16, 8, 3), (64, 32, 8, 2))},
    99: {16: ((16, 16, 4, 3),), 32: ((32, 16, 8, 2),), 64: ((32, 16, 8, 2),)},
    64: {16: ((16, 16, 4, 1),), 32: ((16, 16, 4, 1),), 64: ((16, 16, 4, 1),)},
}
# Of 8 bits, where the accumulator leaves too few registers for conversions of more rows.
EIGHT_BIT = {
    227: {16: ((16, 32, 4, 4),), 32: ((32, 32, 8, 4),)},
    163: {16: ((16, 32, 8, 3),), 32: ((32, 32, 8, 3),)},
    99: {16: ((16, 16, 4, 3),), 32: ((32, 16, 8, 2),)},
    64: {16: ((16, 16, 4, 1),), 32: ((16, 16, 4, 1),)},
}
# In words (`kernels.latent`): the next block is in registers, and numbers of 16 bits are in shared memory. Loops of 64
# rows spill registers.
WORDS = {
    227: {16: ((16, 32, 4, 1), (16, 64, 8, 1)), 32: ((32, 32, 8, 1),)},
    163: {16: ((16, 32, 4, 1),), 32: ((32, 32, 8, 1),)},
    99: {16: ((16, 32, 4, 1),), 32: ((32, 32, 8, 1),)},
    64: {16: ((16, 16, 4, 1),), 32: ((16, 16, 4, 1),)},
}
EXACT = KernelConfig(16, 16, 8, 1)  # float32


def forward(problem: Problem, device: Device) -> Iterator[tuple[TileConfig, int]]:
    """Tiles, and numbers of programs that share the keys of a tile. A given `num_splits` has the first tile."""
    p, group = problem, group_of(problem)
    found = tiles(p, device)
    for tile in found:
        given = None if tile == found[0] else found[0]
        chosen = TileConfig(tile, EXACT, EXACT, pack_gqa=group, given_splits=given)
        blocks = -(-packed_rows(p) // tile.block_m)
        programs = max(1, blocks * p.num_heads_q // group * p.batch)
        slots = device.cores * programs_of_core(p, device, tile)
        for n in (1, *splits_that_fill(tables.SPLITS, programs, slots, -(-p.seqlen_k // tile.block_n))):
            yield chosen, n


def tiles(problem: Problem, device: Device) -> tuple[KernelConfig, ...]:
    p = problem
    if device.type == "cpu":
        return (tables.INTERPRETER.forward,)
    if p.dtype is torch.float32:
        return (EXACT,)
    table = TILES if p.eight_bit is None else WORDS if reads_words(p) else EIGHT_BIT
    by_rows = table[max(size for size in table if size <= memory_of(device))]
    most = LEAST_WGMMA // 2 if misaligned(p, device) else max(by_rows)
    rows = min(most, max(16, power_of_two(packed_rows(p))))
    return tuple(KernelConfig(m, n, num_warps, num_stages) for m, n, num_warps, num_stages in by_rows[rows])
