"""Kernel configurations for families of problems and chips: measured on the chips we have, fitted to the others.

A chip's family follows from its shared memory for one program, and from how its matrix units are fed.
"""

from typing import NamedTuple

import torch

from ...call.call import NO_FEATURES
from ...call.device import Device
from ...call.problem import LONGEST, Problem, power_of_two
from ..gpu.decoding import is_decoding
from . import decoding, float32_tiles, tuned
from .decoding import SHORT
from .families import MOST_SHARED_MEMORY, has_most, has_pairs, memory_of, misaligned, needs_room, reads_pairs
from .tile_config import FusedConfig, KernelConfig, TileConfig, WidthConfigs
from .wide import takes_products


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


HALF = {  # float16 and bfloat16, by shared memory
    MOST_SHARED_MEMORY: (
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
    WidthConfigs(64, float32_tiles.LARGE, float32_tiles.DKDV, float32_tiles.LARGE),
    WidthConfigs(
        128,
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
        KernelConfig(32, 32, 8, 1, precision="tf32x3"),
        KernelConfig(32, 32, 4, 1, precision="tf32x3"),
    ),
)
SPLIT_DKDV = KernelConfig(64, 64, 4, 1, precision="bf16x6")  # measured on an H100
TF32_DKDV = KernelConfig(64, 32, 4, 1, precision="tf32x3")  # of one product, measured on an H100
SPLIT_WIDTH, SPLIT_LENGTH = 64, 256
SPLIT_PAIRS, SPLIT_PAIRS_NARROW, SPLIT_PAIRS_PACKED = 2**21, 2**23, 2**24  # of dense calls, up to 32 features
ALIGNED = 16  # bytes of one asynchronous copy
BIASED = WidthConfigs(  # calls of 16-bit numbers with a bias for each pair, measured on an H200
    32, KernelConfig(64, 64, 4, 3), KernelConfig(32, 128, 4, 3), KernelConfig(128, 32, 4, 3)
)
BY_PYTORCH = {False: "PyTorch's", True: "PyTorch's, of bfloat16 parts"}  # of float32
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
    Walk("keys", 256, 64, 8, 1, programs=1, width=64, longest=256),
)
MOST_SPLITS = 16  # of a walk: the last program to finish adds up the sums of all
MOST_WITH_FEATURES = 64  # rows or keys of a block; a feature of each pair makes larger ones spill (not measured)
INTERPRETER_WALKS = tuple(Walk(over, 16, 16, 4, 1, programs=4, width=512) for over in ("keys", "rows"))
SHORT_WINDOW = 2048  # keys of a row, of which a large tile would mask much
SMALL = KernelConfig(64, 64, 4, 3)  # two programs on a Hopper core, up to width 128
SHORT_PAIRS, INTERPRETER_PAIRS = 64 * 128, 16 * 16  # of a tile that is a whole sequence in backward
SHORT_LENGTH = 128  # of its rows and of its keys: longer and narrower ones spill 1 to 4 KB a thread


def tile(problem: Problem, device: Device) -> TileConfig:
    tiles = pass_tiles(problem, device)
    by = BY_PYTORCH[problem.dtype is torch.float32]
    if takes_products(problem, device):
        tiles = tiles._replace(products=by)
    if takes_products(problem, device, backward=True):
        return tiles._replace(products_backward=by, dbias=dbias_tile(tiles.dq, problem, device))
    return tiles._replace(dbias=dbias_tile(tiles.dq, problem, device), fused=fused_tile(problem, device))


def dbias_tile(dq: KernelConfig, problem: Problem, device: Device) -> KernelConfig:
    """The tile of a bias's gradient, whose program adds up one tile of many sequences: square ones load least, and a
    second stage hides the loads (H200: 13 to 27% of backward with such a gradient at 4096 x 4096). The bias itself is
    loaded once, but for 64 features, where its registers cost more (docs/journal/2026-11-25-bands.md).
    """
    width = max(problem.head_dim, problem.head_dim_v)
    if not has_most(problem.dtype, device) or width > 128 or misaligned(problem, device):
        return dq._replace(num_stages=1)
    if is_biased(problem, device):
        return KernelConfig(64, 64, 4, 3, bias_once=True)
    return KernelConfig(64, 64, 4, 2) if width <= 64 else KernelConfig(64, 128, 8, 2, bias_once=True)


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
    if block_m * block_n > most_pairs or max(block_m, block_n) > SHORT_LENGTH:
        return None
    if width > (128 if has_most(p.dtype, device) else 64):
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
    if is_decoding(problem, large_groups=has_most(problem.dtype, device)):
        return decoding.tiles(row, problem, device)
    if not needs_room(problem, device):
        tuned_configs = tuned_row(row, problem.dtype, device)
        row = tuned_configs._replace(forward=row.forward) if wants_small(problem, row, device) else tuned_configs
        row = float32_tiles.filling(row, problem, device) if problem.layout == "dense" else row
    return TileConfig(row.forward, row.dkdv, row.dq)


def row_of(problem: Problem, device: Device) -> WidthConfigs:
    if device.type == "cpu":
        return INTERPRETER
    row = fitted(shipped(problem.dtype, max(problem.head_dim, problem.head_dim_v), device), problem, device)
    return row._replace(dkdv=SPLIT_DKDV, dq=float32_tiles.SPLIT_DQ) if splits_rows(problem, row, device) else row


def by_tf32(tile: TileConfig) -> TileConfig:
    """The tiles for one TF32 product in place of six of bfloat16 parts."""
    products, backward = (x and BY_PYTORCH[False] for x in (tile.products, tile.products_backward))
    tile = tile._replace(products=products, products_backward=backward)
    return tile._replace(dkdv=TF32_DKDV, dq=SINGLE_TF32X3[0].dq) if tile.dkdv.precision == "bf16x6" else tile


def splits_rows(problem: Problem, row: WidthConfigs, device: Device) -> bool:
    """Whether backward splits float32 rows ahead of its kernels, which takes four more launches: where each row is read
    several times, and without a tile of a feature, for which the kernels have no registers.
    """
    p = problem
    pairs = p.batch * p.num_heads_q * p.seqlen_q * p.seqlen_k
    fits = p.layout != "paged" and p.alignment == ALIGNED and not (has_pairs(p) or p.dropout)
    measured = p.dtype is torch.float32 and device.arch == "sm_90" and row.width <= SPLIT_WIDTH
    narrow = max(p.head_dim, p.head_dim_v) <= float32_tiles.NARROW
    least = SPLIT_PAIRS_PACKED if p.layout != "dense" else SPLIT_PAIRS_NARROW if narrow else SPLIT_PAIRS
    return measured and fits and min(p.seqlen_q, p.seqlen_k) >= SPLIT_LENGTH and pairs >= least


def shipped(dtype: torch.dtype, width: int, device: Device) -> WidthConfigs:
    """The shipped configurations for plain problems of a width."""
    table = SINGLE if dtype is torch.float32 else HALF
    rows = table[max(size for size in table if size <= memory_of(device))]
    if dtype is torch.float32 and device.arch == "sm_90":
        rows = (*SINGLE_TF32X3, *rows)
    return next(row for row in rows if width <= row.width)


def tuned_row(row: WidthConfigs, dtype: torch.dtype, device: Device) -> WidthConfigs:
    """The row, with the configurations that `flashtile tune` saved on this machine. It tries no products of parts."""
    launches = tuned.launches(device, family(dtype), row.width) if device.type == "cuda" else {}
    found = {
        kernel: KernelConfig(*numbers, tuned=True, precision=getattr(row, kernel).precision)
        for kernel, numbers in launches.items()
        if getattr(row, kernel).precision != "bf16x6"
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
