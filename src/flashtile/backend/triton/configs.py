"""Kernel configurations for families of problems and chips: measured on the chips we have, fitted to the others.

A chip's family follows from its shared memory for one program, and from how its matrix units are fed.
"""

import math
from typing import NamedTuple

import torch

from ...call.call import NO_FEATURES
from ...call.device import Device
from ...call.problem import LONGEST, Problem, power_of_two
from ...expression.formula import Formula, loads_pairs
from ..gpu.decoding import MAX_ROWS, group_of, is_decoding, packed_rows
from . import tuned
from .wide_float32 import takes_products


class KernelConfig(NamedTuple):
    """A kernel's tile of query rows and keys, its warps and its pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tuned: bool = False  # found by `flashtile tune` on this machine
    precision: str = "ieee"  # of float32 products (`Constants.PRECISION`)

    def __str__(self) -> str:
        tuned = ", tuned on this machine" * self.tuned
        return f"{self.block_m} x {self.block_n} ({self.num_warps} warps, {self.num_stages} stages{tuned})"


class FusedConfig(NamedTuple):
    """One kernel for all gradients: all rows or all keys of a head are one block, or both are. `splits` programs share
    the walk over the blocks of the other side.
    """

    tile: KernelConfig
    walk: str | None = None  # over "keys" or "rows"
    splits: int = 1

    def __str__(self) -> str:
        shared = f", {self.splits} splits" * (self.splits > 1)
        return str(self.tile) + ("" if self.walk is None else f" over {self.walk}{shared}")


class Walk(NamedTuple):
    """A walk over "keys" or "rows", in steps, for blocks of the other side and heads up to `width`."""

    over: str
    block: int
    step: int
    num_warps: int
    num_stages: int
    programs: int  # of a core: as many run at once, and share walks where heads are few
    width: int
    longest: int = LONGEST  # of the side that is walked over; longer ones were not measured


class TileConfig(NamedTuple):
    """The kernels' configurations for one problem. Forward packs `pack_gqa` query heads of a group into one tile, and
    `fused` is one kernel for all gradients, where rows or keys are few. `dbias` is that of dq unless it is given.
    `given_splits` is that of forward in a call with `num_splits`, unless they are the same. `products` says who
    multiplies, if it is not these kernels (`host_products`).
    """

    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig
    pack_gqa: int = 1
    dbias: KernelConfig | None = None
    fused: FusedConfig | None = None
    given_splits: KernelConfig | None = None
    products: str | None = None


class WidthConfigs(NamedTuple):
    """The configurations for head dimensions up to `width`."""

    width: int
    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig


KIB = 1024
SHARED_MEMORY = {  # KiB that one program may take
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "sm_121": 99, "gfx942": 64, "gfx950": 160,
}  # fmt: skip
MIN_SHARED_MEMORY = 64

HALF = {  # float16 and bfloat16, by shared memory
    227: (
        WidthConfigs(64, KernelConfig(64, 64, 4, 3), KernelConfig(64, 64, 4, 3), KernelConfig(128, 64, 4, 3)),
        WidthConfigs(128, KernelConfig(128, 128, 8, 3), KernelConfig(32, 128, 8, 3), KernelConfig(128, 64, 8, 3)),
        WidthConfigs(256, KernelConfig(128, 64, 8, 2), KernelConfig(64, 64, 8, 1), KernelConfig(128, 32, 8, 2)),
        WidthConfigs(512, KernelConfig(64, 32, 8, 2), KernelConfig(32, 32, 8, 1), KernelConfig(64, 16, 8, 1)),
    ),
    99: (
        WidthConfigs(64, KernelConfig(128, 64, 4, 3), KernelConfig(64, 64, 4, 2), KernelConfig(64, 64, 4, 2)),
        WidthConfigs(128, KernelConfig(64, 64, 4, 2), KernelConfig(32, 64, 4, 2), KernelConfig(64, 32, 4, 2)),
        WidthConfigs(256, KernelConfig(64, 32, 4, 2), KernelConfig(32, 32, 4, 1), KernelConfig(32, 32, 4, 1)),
        WidthConfigs(512, KernelConfig(32, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    ),
    64: (
        WidthConfigs(64, KernelConfig(128, 64, 4, 1), KernelConfig(64, 64, 4, 1), KernelConfig(64, 64, 4, 1)),
        WidthConfigs(128, KernelConfig(64, 64, 4, 1), KernelConfig(32, 64, 4, 1), KernelConfig(64, 32, 4, 1)),
        WidthConfigs(256, KernelConfig(64, 32, 4, 1), KernelConfig(16, 32, 4, 1), KernelConfig(32, 16, 4, 1)),
        WidthConfigs(512, KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1), KernelConfig(16, 16, 4, 1)),
    ),
}
SINGLE = {  # float32; exact products have no matrix units, so registers bound the tiles
    64: (
        WidthConfigs(64, KernelConfig(64, 32, 8, 1), KernelConfig(32, 32, 8, 1), KernelConfig(32, 32, 8, 1)),
        WidthConfigs(128, KernelConfig(32, 32, 8, 1), KernelConfig(16, 32, 8, 1), KernelConfig(32, 16, 8, 1)),
        WidthConfigs(256, KernelConfig(16, 32, 8, 1), KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1)),
        WidthConfigs(512, KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1), KernelConfig(16, 16, 8, 1)),
    ),
}
SINGLE_TF32X3 = (  # measured on an H200; wider tiles of float32 have no registers for compensated sums
    WidthConfigs(
        64,
        KernelConfig(128, 64, 8, 1, precision="tf32x3"),
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
        KernelConfig(128, 64, 8, 1, precision="tf32x3"),
    ),
    WidthConfigs(
        128,
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
        KernelConfig(32, 32, 8, 1, precision="tf32x3"),
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
    ),
)
SPLIT_DKDV = KernelConfig(64, 64, 4, 1, precision="bf16x6")  # measured on an H100
SPLIT_DQ = KernelConfig(128, 64, 8, 2, precision="bf16x6")
SPLIT_WIDTH, SPLIT_LENGTH, SPLIT_PAIRS = 64, 256, 2**24
ALIGNED = 16  # bytes of one asynchronous copy
BIASED = WidthConfigs(  # calls of 16-bit numbers with a bias for each pair, measured on an H200
    32, KernelConfig(64, 64, 4, 3), KernelConfig(32, 128, 4, 3), KernelConfig(128, 32, 4, 3)
)
BY_PYTORCH = "PyTorch's, of bfloat16 parts"
INTERPRETER = WidthConfigs(512, *(KernelConfig(16, 16, 4, 1),) * 3)
WALKS = (  # 16-bit inputs, measured on an H200; the first that fits
    Walk("keys", 16, 128, 4, 3, programs=4, width=32),
    Walk("keys", 16, 64, 4, 3, programs=4, width=64),
    Walk("keys", 32, 64, 4, 3, programs=2, width=64),
    Walk("keys", 64, 64, 4, 3, programs=2, width=64),
    Walk("keys", 64, 32, 4, 2, programs=2, width=128),
    Walk("keys", 128, 64, 4, 3, programs=2, width=32),
    Walk("rows", 16, 128, 4, 2, programs=4, width=16),
    Walk("rows", 256, 64, 8, 1, programs=1, width=32, longest=256),
    Walk("keys", 256, 64, 8, 2, programs=1, width=64, longest=256),
)
MOST_SPLITS = 16  # of a walk: the last program to finish adds up the sums of all
MOST_WITH_FEATURES = 64  # rows or keys of a block; a feature of each pair makes larger ones spill (not measured)
INTERPRETER_WALKS = tuple(Walk(over, 16, 16, 4, 1, programs=4, width=512) for over in ("keys", "rows"))
MIN_COPY_BYTES = 4  # of an asynchronous copy
KEYS_TIMES_WIDTH, FEW = 8192, 16  # of a tile that decodes; rows above which products take time too
FEW_SPLITS = 4  # up to which several programs of a core share a row; merging more takes longer than it gains
TWO_CHUNKS = range(65, 97)  # widths that are held as 64 and 16 or 32 features: more warps have no more to do
SHORT_WINDOW = 2048  # keys of a row, of which a large tile would mask much
SMALL = KernelConfig(64, 64, 4, 3)  # two programs on a Hopper core, up to width 128
MIN_SPLIT_KEYS = 64  # of one split of a row
SHORT_PAIRS, INTERPRETER_PAIRS = 64 * 128, 16 * 16  # of a tile that is a whole sequence in backward
SHORT = 64  # rows and keys of a sequence that is one small tile


def tile(problem: Problem, device: Device) -> TileConfig:
    tiles = pass_tiles(problem, device)
    if takes_products(problem, device):
        return tiles._replace(products=BY_PYTORCH)
    return tiles._replace(dbias=dbias_tile(tiles.dq, problem, device), fused=fused_tile(problem, device))


def dbias_tile(dq: KernelConfig, problem: Problem, device: Device) -> KernelConfig:
    """The tile of a bias's gradient, whose program adds up one tile of many sequences: square ones load least, and a
    second stage hides the loads (H200: 13 to 27% of backward with such a gradient at 4096 x 4096).
    """
    width = max(problem.head_dim, problem.head_dim_v)
    if not has_most(problem.dtype, device) or width > 128 or misaligned(problem, device):
        return dq._replace(num_stages=1)
    if is_biased(problem, device):
        return KernelConfig(64, 128, 4, 3)
    return KernelConfig(64, 64, 4, 2) if width <= 64 else KernelConfig(64, 128, 8, 2)


def fused_tile(problem: Problem, device: Device) -> FusedConfig | None:
    """The configuration of one kernel for all gradients; `None` where neither rows nor keys are few enough."""
    p = problem
    if p.layout != "dense" or p.num_heads_q != p.num_heads_kv or p.dtype is torch.float32 or misaligned(p, device):
        return None
    if (tile := one_tile(problem, device)) is not None:
        return FusedConfig(tile)
    return one_block(problem, device)


def one_tile(problem: Problem, device: Device) -> KernelConfig | None:
    """One tile for all rows and keys of a sequence; `None` for more pairs than registers hold."""
    p = problem
    block_m, block_n = (max(16, power_of_two(n)) for n in (p.seqlen_q, p.seqlen_k))
    width = max(p.head_dim, p.head_dim_v)
    most_pairs = INTERPRETER_PAIRS if device.type == "cpu" else SHORT_PAIRS if width <= 64 else SHORT_PAIRS // 2
    if block_m * block_n > most_pairs or width > (128 if has_most(p.dtype, device) else 64):
        return None
    if block_m * block_n <= 32 * 32:
        return KernelConfig(block_m, block_n, 4, 1)
    idle = p.batch * p.num_heads_q < device.cores  # each program has a multiprocessor alone: more warps are quicker
    if width > 64 and idle:
        return KernelConfig(block_m, block_n, 8, 1)
    return KernelConfig(block_m, block_n, 4, 2 if has_most(p.dtype, device) else 1)


def one_block(problem: Problem, device: Device) -> FusedConfig | None:
    """One block for all rows or all keys of a sequence, and a walk over the blocks of the other side."""
    p = problem
    width = max(p.head_dim, p.head_dim_v)
    rows, keys = (max(16, power_of_two(n)) for n in (p.seqlen_q, p.seqlen_k))
    walks = INTERPRETER_WALKS if device.type == "cpu" else WALKS if has_most(p.dtype, device) else ()
    features = has_pairs(p) or p.dropout
    for walk in walks:
        block, length = (rows, keys) if walk.over == "keys" else (keys, rows)
        fits = block == walk.block <= length <= walk.longest and width <= walk.width
        if not fits or (features and block > MOST_WITH_FEATURES):
            continue
        sides = (block, walk.step) if walk.over == "keys" else (walk.step, block)
        config = KernelConfig(*sides, walk.num_warps, 1 if features else walk.num_stages)
        shared = walk.programs * device.cores // max(p.batch * p.num_heads_q, 1)
        return FusedConfig(config, walk.over, max(1, min(shared, length // walk.step // 2, MOST_SPLITS)))
    return None


def pass_tiles(problem: Problem, device: Device) -> TileConfig:
    """The configurations of sequences of any length."""
    row = row_of(problem, device)
    if not is_decoding(problem, large_groups=has_most(problem.dtype, device)):
        if not needs_room(problem, device):
            tuned_configs = tuned_row(row, problem.dtype, device)
            row = tuned_configs._replace(forward=row.forward) if wants_small(problem, row, device) else tuned_configs
        return TileConfig(row.forward, row.dkdv, row.dq)
    forward, group = decoding(row, problem, device), group_of(problem)
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


def decoding(row: WidthConfigs, problem: Problem, device: Device) -> KernelConfig:
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
    return KernelConfig(FEW, 64, 2, 3) if width <= 64 and programs <= 2 * device.cores else chosen


def loads_ahead(problem: Problem, device: Device) -> bool:
    """Whether a tile of few rows has the shared memory for several blocks of keys, copied asynchronously whatever their
    address.
    """
    widths = problem.head_dim, problem.head_dim_v
    asynchronous = all(n * problem.dtype.itemsize % MIN_COPY_BYTES == 0 for n in widths)
    return has_most(problem.dtype, device) and asynchronous and not (has_pairs(problem) or problem.dropout)


def row_of(problem: Problem, device: Device) -> WidthConfigs:
    if device.type == "cpu":
        return INTERPRETER
    row = fitted(shipped(problem.dtype, max(problem.head_dim, problem.head_dim_v), device), problem, device)
    return row._replace(dkdv=SPLIT_DKDV, dq=SPLIT_DQ) if splits_rows(problem, row, device) else row


def splits_rows(problem: Problem, row: WidthConfigs, device: Device) -> bool:
    """Whether backward splits float32 rows ahead of its kernels, which takes four more launches: where each row is read
    several times, and without a tile of a feature, for which the kernels have no registers.
    """
    p = problem
    pairs = p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k
    fits = p.layout != "paged" and p.alignment == ALIGNED and not (has_pairs(p) or p.dropout)
    measured = p.dtype is torch.float32 and device.arch == "sm_90" and row.width <= SPLIT_WIDTH
    return measured and fits and min(p.seqlen_q, p.seqlen_k) >= SPLIT_LENGTH and pairs >= SPLIT_PAIRS


def shipped(dtype: torch.dtype, width: int, device: Device) -> WidthConfigs:
    """The shipped configurations for plain problems of a width."""
    table = SINGLE if dtype is torch.float32 else HALF
    rows = table[max(size for size in table if size <= memory_of(device))]
    if dtype is torch.float32 and device.arch == "sm_90":
        rows = (*SINGLE_TF32X3, *rows)
    return next(row for row in rows if width <= row.width)


def memory_of(device: Device) -> int:
    return SHARED_MEMORY.get(device.arch, MIN_SHARED_MEMORY)


def has_pairs(problem: Problem) -> bool:
    """Whether a feature adds a value to the score of each pair, which a kernel holds."""
    p = problem
    return p.features.mask is not None or p.features.score_terms or reads_pairs(p)


def reads_pairs(problem: Problem) -> bool:
    """Whether a score_mod or mask function reads an element for each pair. Others, which only calculate, get tiles as
    large as those without one (H200, backward of ALiBi as a score_mod: 11% faster at width 64, 35% at 128; of a causal
    condition 15% slower at 64).
    """
    return any(isinstance(x, Formula) and loads_pairs(x) for x in (problem.score_mod, problem.mask_mod))


def has_most(dtype: torch.dtype, device: Device) -> bool:
    """Whether the configurations are those of chips with the most shared memory, one of which we measured."""
    return dtype is not torch.float32 and memory_of(device) >= max(HALF)


def needs_room(problem: Problem, device: Device) -> bool:
    """Whether a tile may need more shared memory than in the plain problems on which tiles are tuned."""
    return misaligned(problem, device) or problem.dropout or has_pairs(problem) or problem.pages is not None


def misaligned(problem: Problem, device: Device) -> bool:
    """Whether rows cannot be copied asynchronously on Hopper. There, ptxas 12.8 miscompiles some warpgroup products of
    such tiles (`tests/offline` detects it); tiles of 32 rows have none.
    """
    return problem.alignment < MIN_COPY_BYTES and device.arch == "sm_90"


def tuned_row(row: WidthConfigs, dtype: torch.dtype, device: Device) -> WidthConfigs:
    """The row, with the configurations that `flashtile tune` saved on this machine."""
    launches = tuned.launches(device, family(dtype), row.width) if device.type == "cuda" else {}
    found = {
        kernel: KernelConfig(*numbers, tuned=True, precision=getattr(row, kernel).precision)
        for kernel, numbers in launches.items()
    }
    return row._replace(**found)


def family(dtype: torch.dtype) -> str:
    return "single" if dtype is torch.float32 else "half"


def fitted(row: WidthConfigs, problem: Problem, device: Device) -> WidthConfigs:
    """Smaller tiles for features that hold a tile of their own in shared memory or registers: in all kernels a bias,
    mask or score_mod with an element for every pair; in forward, whose tiles are the largest, any bias, dropout and
    ALiBi. Also for problems that are `misaligned`, or for which `wants_small` holds.
    """
    if is_biased(problem, device):
        return BIASED
    pair_tensors = [x for x in (problem.features.bias, problem.features.mask) if x is not None]
    of_pairs = reads_pairs(problem) or any(not (x[2] or x[3]) for x in pair_tensors)
    small = wants_small(problem, row, device)
    forward, dkdv, dq = SMALL if small else row.forward, row.dkdv, row.dq
    if misaligned(problem, device):
        forward, dq = (x._replace(block_m=32, num_warps=4) for x in (forward, dq))
        dkdv = dkdv._replace(block_n=32, num_warps=4)
    room_for_pairs = problem.dtype is torch.float32 and row.width <= 128 and forward.precision == "ieee"  # in registers
    if (has_pairs(problem) or problem.dropout) and not small and not room_for_pairs:
        forward = forward._replace(block_n=max(16, forward.block_n // 2))
    if of_pairs:
        dkdv = dkdv._replace(block_m=max(16, dkdv.block_m // 2))
        dq = dq._replace(block_n=max(16, dq.block_n // 2))
    return WidthConfigs(row.width, forward, dkdv, dq)


def is_biased(problem: Problem, device: Device) -> bool:
    """Whether a bias for each pair is all that a call of few features adds to a plain one of more than a tile."""
    p, bias = problem, problem.features.bias
    if min(p.seqlen_q, p.seqlen_k) <= SHORT or is_decoding(p, large_groups=True):
        return False
    others = p.features._replace(bias=None) != NO_FEATURES or p.dropout or reads_pairs(p) or misaligned(p, device)
    narrow = max(p.head_dim, p.head_dim_v) <= BIASED.width and has_most(p.dtype, device)
    return narrow and bias is not None and not (bias[2] or bias[3] or others)


def wants_small(problem: Problem, row: WidthConfigs, device: Device) -> bool:
    """Whether forward does much work besides its products: softcap or dropout for every pair, or masks in most blocks,
    as with short windows. Two programs on a core then overlap that work with products and are faster than one large
    tile (H200, width 128: +14%, +2%, +17%).
    """
    left, right = problem.window.left, problem.window.right
    short = left is not None and right is not None and left + right <= SHORT_WINDOW
    measured = has_most(problem.dtype, device) and 64 < row.width <= 128
    return measured and not has_pairs(problem) and (problem.softcap or problem.dropout or short)


def num_programs(config: KernelConfig, pack_gqa: int, problem: Problem) -> int:
    """The tiles of rows of a call."""
    blocks = -(-max(problem.seqlen_q, 1) * pack_gqa // config.block_m)
    return max(1, blocks * problem.num_heads_q // pack_gqa * problem.batch)


def num_splits(problem: Problem, device: Device) -> int:
    """The number of programs that share the keys of a row, so that few rows still fill the chip."""
    chosen = tile(problem, device)
    programs = num_programs(chosen.forward, chosen.pack_gqa, problem)
    several = programs_of_core(chosen.forward, problem, device) * device.cores // programs
    wanted = max(device.cores // programs, min(several, FEW_SPLITS))
    most = math.isqrt(problem.seqlen_k) // 4  # merging takes time for each split: 16 are best for 4096 keys of one row
    return max(1, min(wanted, problem.seqlen_k // MIN_SPLIT_KEYS, most))


def programs_of_core(config: KernelConfig, problem: Problem, device: Device) -> int:
    """The programs of few rows that a core should run at once."""
    if not is_decoding(problem) or not loads_ahead(problem, device):
        return 1
    if config.block_m > FEW:
        return 2 if config.block_m <= MAX_ROWS else 1
    return 4 if config.num_warps == 2 else 1
