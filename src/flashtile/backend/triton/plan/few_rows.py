"""The ways to run forward passes of few rows: decoding, whose tile has the query heads of a group, batch-invariant
decoding, and latent rows.

Loading keys is all the work: two blocks of keys and values are in flight while one is used, smaller tiles let several
programs run on a core, and several programs share the keys of a tile.

Latent rows are keys of 576 features, the first 512 are the values. 128 heads are more rows than a tile has. An
accumulator of 512 columns fills the registers of 8 warps at 64 rows, and the rows of 16 heads leave one core room for
two or three blocks of keys in flight.
"""

from collections.abc import Iterator

import torch

from ....call.device import Device
from ....call.problem import Problem, power_of_two
from ...gpu.chips import MMA_SYNC, memory_of
from ...gpu.decoding import MAX_GROUP, MAX_ROWS, group_of, packed_rows
from ...gpu.waves import splits_that_fill
from ..constants import TRANSPOSED_ROWS
from ..tile_config import KernelConfig, TileConfig
from ..words import reads_words
from . import tables
from .cost import MERGED_AT_ONCE, fits, programs_of_core
from .families import MIN_COPY_BYTES, has_most, has_pairs, has_room, misaligned, width_of

LONG_OF_EIGHT_BITS = 4096  # keys from which a tile has twice as many (`benchmarks/eight_bit_caches.py --forms`)
KEYS_TIMES_WIDTH = 8192  # size of a tile
PAIRS_BYTES = 4096  # shared memory beside rows and probabilities, for a feature of few rows
LEAST_PART, KEYS_OF_ROW = 512, 64  # keys of a part at least, and for each row: results of parts are 2% of the keys
# Registers of a thread that decodes in parts by tiles of few rows: three programs of four warps share a core. Left to
# itself, ptxas takes 255 for the nested loops.
PART_REGISTERS = 168
MOST_PARTS, FILLING = 32, 256  # parts of a sequence, and of all key heads of one
ONE_WARP = KernelConfig(16, 32, 1, 4)  # up to 96 features, where it waits less for others
SHORT = 64  # rows and keys of a sequence that is one small tile
# Tiles of latent rows by shared memory in KiB, then rows; a chip takes the largest that it has room for.
HALF = {
    227: {
        16: ((16, 32, 4, 4), (16, 64, 8, 3)),
        32: ((32, 32, 8, 4), (32, 64, 8, 3)),
        64: ((64, 32, 8, 3), (64, 64, 8, 2)),
    },
    163: {16: ((16, 32, 4, 3), (16, 64, 8, 2)), 32: ((32, 32, 8, 3),), 64: ((64, 16, 8, 3), (64, 32, 8, 2))},
    99: {16: ((16, 16, 4, 3),), 32: ((32, 16, 8, 2),), 64: ((32, 16, 8, 2),)},
    64: {16: ((16, 16, 4, 1),), 32: ((16, 16, 4, 1),), 64: ((16, 16, 4, 1),)},
}
# The same in 8 bits, where the accumulator leaves too few registers for conversions of more rows.
EIGHT_BIT = {
    227: {16: ((16, 32, 4, 4),), 32: ((32, 32, 8, 4),)},
    163: {16: ((16, 32, 8, 3),), 32: ((32, 32, 8, 3),)},
    99: {16: ((16, 16, 4, 3),), 32: ((32, 16, 8, 2),)},
    64: {16: ((16, 16, 4, 1),), 32: ((16, 16, 4, 1),)},
}
# The same in words (`kernels.latent`): the next block is in registers, and numbers of 16 bits are in shared memory.
# Loops of 64 rows spill registers.
WORDS = {
    227: {16: ((16, 32, 4, 1), (16, 64, 8, 1)), 32: ((32, 32, 8, 1),)},
    99: {16: ((16, 32, 4, 1),), 32: ((32, 32, 8, 1),)},
    64: {16: ((16, 16, 4, 1),), 32: ((16, 16, 4, 1),)},
}
EXACT = KernelConfig(16, 16, 8, 1)  # float32


def ways(tiles: TileConfig, width: int, problem: Problem, device: Device) -> Iterator[tuple[TileConfig, int]]:
    """Of decoding and sequences of one small tile. A given `num_splits` has one tile, whatever the lengths."""
    p = problem
    base = within_memory(tile_of(tiles.forward, width, p, device), p, device)
    found, plain, wide = [base], p.layout == "dense", 48 < width_of(p) <= 128
    whole = plain or (p.pages is not None and not p.pages.several)  # a dense cache has one page for each sequence
    if p.eight_bit is not None:
        twice = width_of(p) > 64 and base.block_n == 64 and p.seqlen_k >= LONG_OF_EIGHT_BITS
    else:
        four = base.num_warps == 4 or width_of(p) <= 64  # warps, of 128 keys; few calls are faster by 64 keys and two
        twice = base.block_m == TRANSPOSED_ROWS and four and whole and has_most(p.dtype, device)
    if twice and wide:
        num_warps = base.num_warps if p.eight_bit is not None else 4
        found = [within_memory(base._replace(block_n=128, num_warps=num_warps), p, device)]
    if loads_ahead(p, device):
        uneven = p.pages is not None and p.pages.several  # one warp lacks registers for the addresses of pages
        if base.block_m == ONE_WARP.block_m and width_of(p) <= 96 and not uneven:
            found.append(ONE_WARP)
        if plain and p.seqlen_q > 1 and max(p.seqlen_q, p.seqlen_k) <= SHORT:
            found.append(within_memory(base._replace(block_m=SHORT, block_n=SHORT, num_stages=1), p, device))
    for tile in dict.fromkeys(found):
        chosen = tiles._replace(forward=tile, pack_gqa=group_of(p), given_splits=None if tile == base else base)
        filling = {*splits(p, device, tile), *splits(p, device, tile, device.cores)}
        if device.cores <= tiles_of(p, tile) <= device.cores * programs_of_core(p, device, tile):
            filling = set()  # every core loads, and no tile waits: splits gain nothing
        if max(filling, default=1) > MERGED_AT_ONCE:  # fewer programs may be worth it for the merge
            filling.add(MERGED_AT_ONCE)
        yield from ((chosen, n) for n in sorted({1, *filling}))


def splits(
    problem: Problem, device: Device, tile: KernelConfig, slots: int | None = None, most: int | None = None
) -> list[int]:
    """Numbers of programs, at most so many, that share the keys of a group's tile and fill the slots: all of a chip,
    unless they are given.
    """
    p = problem
    slots = slots or device.cores * programs_of_core(p, device, tile)
    return splits_that_fill(tables.SPLITS, tiles_of(p, tile), slots, most or -(-p.seqlen_k // tile.block_n))


def tiles_of(problem: Problem, tile: KernelConfig) -> int:
    """Tiles of all groups; at least one."""
    p = problem
    return max(1, -(-packed_rows(p) // tile.block_m) * p.num_heads_q // group_of(p) * p.batch)


def batch_invariant(
    tiles: TileConfig, width: int, problem: Problem, device: Device
) -> Iterator[tuple[TileConfig, int]]:
    """The tile of batch-invariant calls of these heads and features, in any layout; of decoding, with any number of
    programs, among which parts of keys are dealt. Parts have `part_keys`, or a multiple of them where there would be
    more than `most_parts`.
    """
    p = problem
    if not p.decodes:
        yield tiles._replace(forward=with_whole_rows(tiles.forward, p, device)), 1
        return
    tile = tile_of(tiles.forward, width, p, device)
    tile = within_memory(tile._replace(block_m=min(tile.block_m, MAX_GROUP)), p, device)
    part_keys = max(LEAST_PART, KEYS_OF_ROW * power_of_two(group_of(p)))
    few = tile.block_m == TRANSPOSED_ROWS and width_of(p) <= 64 and device.arch.startswith("sm_")
    registers = PART_REGISTERS if few else None
    chosen = tiles._replace(forward=tile, pack_gqa=group_of(p), part_keys=part_keys, part_registers=registers)
    parts = min(-(-p.seqlen_k // part_keys), most_parts(p.num_heads_kv))
    yield from ((chosen, n) for n in (1, *splits(p, device, tile, most=parts)))


def with_whole_rows(tile: KernelConfig, problem: Problem, device: Device) -> KernelConfig:
    """The tile, or one that adds up a row in one order: a warp has all keys of its rows, or all warps share 16 rows.
    Triton divides rows among warps where it sees that two products follow each other; else rows and keys, unless there
    are far more rows or keys. It sees that in a kernel with pages, and not in one without.
    """
    if tile.precision == "tf32x3":
        return tile if tile.block_m >= tables.WARPGROUP.block_m else tables.WARPGROUP
    by_warpgroups = device.arch not in MMA_SYNC and tile.block_m >= 16 * tile.num_warps
    if by_warpgroups or problem.dtype is torch.float32 or not device.arch.startswith("sm_"):
        return tile
    whole = next(tile for width, tile in tables.WHOLE_ROWS if width_of(problem) <= width)
    return within_memory(whole, problem, device)


def most_parts(key_heads: int) -> int:
    """Parts of a sequence's keys at most: more where few key heads leave cores without work."""
    return max(MOST_PARTS, min(2 * MOST_PARTS, FILLING // max(key_heads, 1)))


def tile_of(shipped: KernelConfig, width: int, problem: Problem, device: Device) -> KernelConfig:
    """The tile of few rows, whatever the batch and the lengths: with a given number of splits, a sequence's bits depend
    neither on the batch nor on the longest sequence in it.
    """
    block_n = max(16, KEYS_TIMES_WIDTH // width)
    block_m, ahead = max(16, power_of_two(packed_rows(problem))), loads_ahead(problem, device)
    if packed_rows(problem) <= TRANSPOSED_ROWS and width <= 256 and ahead:
        block_m = TRANSPOSED_ROWS
    if misaligned(problem, device):
        block_m = min(block_m, shipped.block_m)
    if not ahead:
        return KernelConfig(block_m, min(shipped.block_n, block_n), 4, shipped.num_stages)
    if block_m > MAX_ROWS and width > 64:
        return KernelConfig(block_m, block_n, 8, 4)
    if block_m > 16:  # products take time too
        return KernelConfig(min(block_m, MAX_ROWS), 64 if width <= 128 else max(16, block_n // 2), 4, 3)
    return KernelConfig(block_m, min(64, max(16, 4 * block_n)), 2 if width_of(problem) <= 96 else 4, 3)


def within_memory(
    tile: KernelConfig, problem: Problem, device: Device, kernel: str = "forward", more: int = PAIRS_BYTES
) -> KernelConfig:
    """The tile, or with fewer keys and then fewer rows one that a chip has the shared memory for, and `more` bytes; for
    tangents, with fewer stages before.
    """
    least = {"num_stages": 1, "block_n": 16, "block_m": 16}
    sides = [*least][kernel == "forward" :]
    while not fits(problem, device, tile, kernel, more):
        side = next((x for x in sides if getattr(tile, x) > least[x]), None)
        if side is None:
            break
        tile = tile._replace(**{side: max(least[side], getattr(tile, side) // 2)})
    return tile


def loads_ahead(problem: Problem, device: Device) -> bool:
    """Whether a tile of few rows has the shared memory for several blocks of keys, copied asynchronously whatever their
    address.
    """
    widths = problem.head_dim, problem.head_dim_v
    size = problem.dtype.itemsize if problem.eight_bit is None else 1
    asynchronous = all(n * size % MIN_COPY_BYTES == 0 for n in widths)
    return has_room(problem.dtype, device) and asynchronous and not (has_pairs(problem) or problem.dropout)


def latent(problem: Problem, device: Device) -> Iterator[tuple[TileConfig, int]]:
    """Of latent rows. A given `num_splits` has the first tile."""
    found = latent_tiles(problem, device)
    for tile in found:
        given = None if tile == found[0] else found[0]
        chosen = TileConfig(tile, EXACT, EXACT, pack_gqa=group_of(problem), given_splits=given)
        yield from ((chosen, n) for n in (1, *splits(problem, device, tile)))


def latent_tiles(problem: Problem, device: Device) -> tuple[KernelConfig, ...]:
    p = problem
    if device.type == "cpu":
        return (tables.INTERPRETER.forward,)
    if p.dtype is torch.float32:
        return (EXACT,)
    table = HALF if p.eight_bit is None else WORDS if reads_words(p) else EIGHT_BIT
    by_rows = table[max(size for size in table if size <= memory_of(device))]
    most = 32 if misaligned(p, device) else max(by_rows)  # Hopper's warpgroup products take 64 rows
    rows = min(most, max(16, power_of_two(packed_rows(p))))
    return tuple(KernelConfig(m, n, num_warps, num_stages) for m, n, num_warps, num_stages in by_rows[rows])
