"""The ways to run a pass of a problem: kernels that hold its width and features, with all splits. The first one serves
every chip; others are added where they were measured.
"""

from collections.abc import Iterator

import torch

from ....call.call import NO_FEATURES
from ....call.device import Device
from ....call.problem import Problem, power_of_two
from ...gpu.chips import MMA_SYNC, memory_of
from ...gpu.decoding import is_decoding
from ...gpu.waves import splits_that_fill
from ..constants import MAX_HEAD_DIM, MOST_MMA
from ..tile_config import BlockedSecond, FusedConfig, KernelConfig, TileConfig, WidthConfigs
from . import few_rows, tables
from .cost import fits, programs_of_core
from .families import MOST_COPY_BYTES, has_most, has_pairs, misaligned, needs_room, reads_pairs, takes_mma, width_of
from .few_rows import PAIRS_BYTES, SHORT, within_memory

BY_PYTORCH = {False: "PyTorch's", True: "PyTorch's, of bfloat16 parts"}  # float32's products
# Features above which a second derivative has the weights of pairs in memory, and KiB of shared memory for its sums.
BLOCKED_ABOVE, BLOCKED_MEMORY = 128, 99
WIDE_FLOAT32, WIDE_HALF = 128, 256  # head dimensions above which tiles are too small to be fast
MOST_KEYS = 2**16  # keys of a row of products, which one program reads
LEAST_STEPS = 4  # steps in each part of a walk
MOST_WITH_FEATURES = 64  # rows or keys of a block; a feature of each pair makes larger ones spill
SHORT_PAIRS, INTERPRETER_PAIRS = 64 * 128, 16 * 16  # pairs of a tile that is a whole sequence in backward
SHORT_LENGTH = 128  # its rows and keys: longer and narrower ones spill 1 to 4 KB a thread


def forward(problem: Problem, device: Device) -> Iterator[tuple[TileConfig, int]]:
    """Tiles, and numbers of programs that share the keys of a tile."""
    if problem.head_dim > MAX_HEAD_DIM:
        yield from few_rows.latent(problem, device)
        return
    p, row = problem, row_of(problem, device)
    plain = TileConfig(row.forward, row.dkdv, row.dq)
    if p.batch_invariant:
        yield from few_rows.batch_invariant(plain, row.width, p, device)
        return
    if multiplies(p, device):
        yield plain._replace(products=BY_PYTORCH[p.dtype is torch.float32]), 1
    if is_decoding(p, large_groups=has_most(p.dtype, device)):
        yield from few_rows.ways(plain, row.width, p, device)
        return
    yield from ((plain._replace(forward=tile), 1) for tile in forward_tiles(row.forward, p, device))
    for tile in mma_tiles("forward", p, device):
        yield plain._replace(forward=tile, given_splits=row.forward), 1


def tangents(problem: Problem, device: Device) -> Iterator[tuple[TileConfig, int]]:
    """Tiles of forward with tangents, and numbers of programs that share the keys of a tile."""
    yield from ((tile, 1) for tile in unsplit_tangents(problem, device))
    for tile in tangents_of(problem, device) if device.type != "cpu" else ():
        if tile.tangents is not None and not tile.tangents.mma:
            yield from ((tile, n) for n in tangent_splits(tile.tangents, problem, device))


def unsplit_tangents(problem: Problem, device: Device) -> list[TileConfig]:
    """The tiles whose programs have all keys of their rows: of the kernel of `kernels.mma`, if it runs the problem."""
    found = tangents_of(problem, device)
    return [x for x in found if x.tangents is not None and x.tangents.mma] or found


def tangents_of(problem: Problem, device: Device) -> list[TileConfig]:
    """Tiles for two accumulators. One of `kernels.mma` has another with it, which splits keys and takes any rows."""
    row = row_of(problem, device)
    tiles = (row.forward,) if device.type == "cpu" else tangent_tiles(problem, device)
    other = next((tile for tile in tiles if not tile.mma), row.forward)
    plain = TileConfig(row.forward, row.dkdv, row.dq)
    return [plain._replace(tangents=tile, given_splits=other if tile.mma else None) for tile in tiles]


def tangent_splits(tile: KernelConfig, problem: Problem, device: Device, kernel: str = "tangents") -> list[int]:
    """Numbers of programs that share the keys of a tile, where these are few. Lists of blocks are not split."""
    p = problem
    if p.features.mask is not None or p.mask_mod is not None:
        return []
    batch, rows, keys = p.counts
    tiles = batch * p.num_heads_q * -(-rows // tile.block_m)
    slots = device.cores * programs_of_core(p, device, tile, kernel)
    return splits_that_fill(tables.SPLITS, tiles, slots, int(-(-keys // tile.block_n)))


def second(problem: Problem, device: Device) -> Iterator[tuple[TileConfig, int]]:
    """The largest tiles that fit of a second derivative, and numbers of programs that share the keys of some rows."""
    p, chips = problem, "float32" if problem.dtype is torch.float32 else "half"
    if (blocked := blocked_second(p, device)) is not None:
        row = row_of(p, device)
        yield TileConfig(row.forward, row.dkdv, row.dq, second=blocked), 1
        return
    pair = (tables.INTERPRETER.dq, tables.INTERPRETER.dkdv)
    if device.type != "cpu":
        pair = (second_tile("second rows", chips, p, device), second_tile("second keys", chips, p, device))
    splits = [] if device.type == "cpu" else tangent_splits(pair[0], p, device, "second rows")
    for plain in unsplit_tangents(p, device):
        yield from ((plain._replace(second=pair), n) for n in (1, *splits))


def blocked_second(problem: Problem, device: Device) -> BlockedSecond | None:
    """The tiles of a wide dense problem whose weights of pairs are in memory; `None` of others, and of a softcap."""
    p = problem
    if width_of(p) <= BLOCKED_ABOVE or p.layout != "dense" or p.softcap:
        return None
    if device.type == "cpu":
        return tables.BLOCKED["interpreter"]
    if memory_of(device) < BLOCKED_MEMORY:
        return None
    return tables.BLOCKED["float32" if p.dtype is torch.float32 else "half"]


def second_tile(kernel: str, chips: str, problem: Problem, device: Device) -> KernelConfig:
    """The first tile that holds a width and has room, else the last."""
    holding = [tile for most, tile in tables.MORE[kernel, chips] if width_of(problem) <= most]
    return next((tile for tile in holding if fits(problem, device, tile, kernel, PAIRS_BYTES)), holding[-1])


def tangent_tiles(problem: Problem, device: Device) -> tuple[KernelConfig, ...]:
    """The tiles of a width that a chip has the shared memory for; with a feature of each pair, of fewer keys."""
    p = problem
    chips = "float32" if p.dtype is torch.float32 else "most" if has_most(p.dtype, device) else "half"
    found = fitting("tangents", chips, p)
    if misaligned(p, device):
        found = tuple(x._replace(block_m=32, num_warps=4) for x in found)
    if needs_room(p, device):
        found = tuple(x._replace(block_n=max(16, x.block_n // 2)) for x in found)
    tiles = dict.fromkeys(within_memory(x, p, device, "tangents", 0) for x in found)
    return (*tiles, *mma_tiles("tangents", p, device))


def forward_tiles(tile: KernelConfig, problem: Problem, device: Device) -> tuple[KernelConfig, ...]:
    """The tile that serves all features; of plain calls and of a bias the tiles that were measured, where there are
    any.
    """
    p = problem
    if device.arch in MMA_SYNC and p.dtype is not torch.float32 and p.pages is None and adds_bias(p, device):
        tiles = (x for x in fitting("forward", "mma.sync", p) if fits(p, device, x, "forward", bias_bytes(p, x)))
        return (tile, *(x for x in tiles if x != tile))
    if device.type == "cpu" or needs_room(p, device):
        return (tile,)
    if has_most(p.dtype, device):
        return fitting("forward", "most", p) or (tile,)
    return (tile, *fitting("rows", "tf32x3", p)) if tile == tables.LARGE else (tile,)


def multiplies(problem: Problem, device: Device, *, backward: bool = False) -> bool:
    """Whether PyTorch can multiply, and this backend's kernels do the rest (`launch.products`): of wide heads on
    Hopper, where six products of bfloat16 numbers take less time than one of float32; in forward, of float32 alone.
    """
    p = problem
    width = width_of(p)
    wide = p.layout == "dense" and width > (WIDE_FLOAT32 if p.dtype is torch.float32 else WIDE_HALF)
    # PyTorch's products on a GPU are not deterministic without settings in the environment.
    if device.arch != "sm_90" or not wide or p.deterministic or p.seqlen_k > MOST_KEYS:
        return False
    # Rows are whole vectors, and random numbers of a row begin with a whole counter.
    if p.head_dim % 8 or p.head_dim_v % 8 or p.octet_start:
        return False
    return backward or p.dtype is torch.float32


def backward(problem: Problem, device: Device) -> Iterator[TileConfig]:
    p, row = problem, row_of(problem, device)
    plain = TileConfig(row.forward, row.dkdv, row.dq, dbias=dbias_tile(row.dq, p, device))
    if multiplies(p, device, backward=True):
        yield plain._replace(products_backward=BY_PYTORCH[p.dtype is torch.float32])
    if row.dq == tables.LARGE and not needs_room(p, device):
        yield from of_float32(plain, p)
    else:
        for dkdv in more(row.dkdv, "dkdv", p, device):
            for dq in more(row.dq, "dq", p, device):
                yield plain._replace(dkdv=dkdv, dq=dq)
    for loop in mma_tiles("one loop", p, device) if not p.deterministic else ():
        yield plain._replace(one_loop=loop)
    half = p.dtype is not torch.float32 and not misaligned(p, device)
    if half and p.layout in ("dense", "varlen") and p.num_heads_q == p.num_heads_kv and not p.seqused_q:
        for fused in (*one_tile(p, device), *(walks(p, device) if p.layout == "dense" else ())):
            yield plain._replace(fused=fused)


def of_float32(plain: TileConfig, problem: Problem) -> Iterator[TileConfig]:
    """Tiles of float32 on Hopper; of rows that were split ahead too, which takes four more launches, without tiles of a
    feature, for which the kernels have no registers.
    """
    for dkdv in (plain.dkdv, *fitting("dkdv", "tf32x3", problem)):
        for dq in (plain.dq, *fitting("rows", "tf32x3", problem)):
            yield plain._replace(dkdv=dkdv, dq=dq)
    if problem.layout != "paged" and problem.alignment == MOST_COPY_BYTES:
        for dq in fitting("dq", "bf16x6", problem):
            yield plain._replace(dkdv=fitting("dkdv", "bf16x6", problem)[0], dq=dq)


def more(tile: KernelConfig, kernel: str, problem: Problem, device: Device) -> list[KernelConfig]:
    """The tile, and others of plain calls, on chips with the most shared memory or with mma.sync."""
    p = problem
    measured = has_most(p.dtype, device) or (p.dtype is not torch.float32 and device.arch in MMA_SYNC)
    if not measured or needs_room(p, device) or p.softcap or p.score_mod or p.mask_mod:
        return [tile]
    others = fitting(kernel, "most" if has_most(p.dtype, device) else "mma.sync", p)
    return list(dict.fromkeys((tile, *others)))


def mma_tiles(kernel: str, problem: Problem, device: Device) -> list[KernelConfig]:
    """The tiles of a kernel of `kernels.mma` that a chip has the shared memory for; of wide heads the largest one."""
    found = fitting(f"mma {kernel}", "mma.sync", problem) if takes_mma(problem, device) else ()
    return [x for x in found if fits(problem, device, x, kernel)][: 1 if width_of(problem) > MOST_MMA else None]


def fitting(kernel: str, chips: str, problem: Problem) -> tuple[KernelConfig, ...]:
    """The tiles of the narrowest width that holds the problem's."""
    table, width = tables.MORE[kernel, chips], width_of(problem)
    least = min((most for most, _ in table if most >= width), default=0)
    return tuple(tile for most, tile in table if most == least)


def one_tile(problem: Problem, device: Device) -> list[FusedConfig]:
    """One tile for all rows and keys of a sequence, dense or packed, if registers hold its pairs."""
    p = problem
    block_m, block_n = (max(16, power_of_two(n)) for n in (p.seqlen_q, p.seqlen_k))
    width = width_of(p)
    most_pairs = INTERPRETER_PAIRS if device.type == "cpu" else SHORT_PAIRS if width <= 64 else SHORT_PAIRS // 2
    widest = 128 if has_most(p.dtype, device) else 64
    if block_m * block_n > most_pairs or max(block_m, block_n) > SHORT_LENGTH or width > widest:
        return []
    stages = 1 if block_m * block_n <= 32 * 32 or not has_most(p.dtype, device) else 2
    return [FusedConfig(KernelConfig(block_m, block_n, 4, stages))]


def walks(problem: Problem, device: Device) -> Iterator[FusedConfig]:
    """One block for all rows or all keys of a sequence, and a walk over the blocks of the other side."""
    p = problem
    width = width_of(p)
    rows, keys = (max(16, power_of_two(n)) for n in (p.seqlen_q, p.seqlen_k))
    known = tables.INTERPRETER_WALKS if device.type == "cpu" else tables.WALKS if has_most(p.dtype, device) else ()
    features = has_pairs(p) or p.dropout
    for walk in known:
        block, length = (rows, keys) if walk.over == "keys" else (keys, rows)
        fits = block == walk.block <= length <= walk.longest and width <= walk.width
        if not fits or (features and block > MOST_WITH_FEATURES):
            continue
        sides = (block, walk.step) if walk.over == "keys" else (walk.step, block)
        tile = KernelConfig(*sides, walk.num_warps, 1 if features else walk.num_stages)
        slots = 2 * programs_of_core(p, device, tile, "fused") * device.cores
        most = min(slots // max(p.batch * p.num_heads_q, 1), length // walk.step // LEAST_STEPS, 16)
        for n in tables.SPLITS:
            if n == 1 or n <= most:
                yield FusedConfig(tile, walk.over, n)


def dbias_tile(dq: KernelConfig, problem: Problem, device: Device) -> KernelConfig:
    """The tile of a bias's gradient, whose program adds up one tile of many sequences: square ones load least, and a
    second stage hides the loads (H200: 13 to 27% of backward with such a gradient at 4096 x 4096). The bias itself is
    loaded once, but for 64 features, where its registers cost more (docs/journal/2026-11-25-bands.md).
    """
    width = width_of(problem)
    if not has_most(problem.dtype, device) or width > 128 or misaligned(problem, device):
        return dq._replace(num_stages=1)
    if is_biased(problem, device):
        return KernelConfig(64, 64, 4, 3, bias_once=True)
    return KernelConfig(64, 64, 4, 2) if width <= 64 else KernelConfig(64, 128, 8, 2, bias_once=True)


def row_of(problem: Problem, device: Device) -> WidthConfigs:
    """The tiles that hold a problem."""
    if device.type == "cpu":
        return tables.INTERPRETER
    if is_biased(problem, device):
        return tables.BIASED
    return fitted(shipped(problem.dtype, width_of(problem), device), problem, device)


def shipped(dtype: torch.dtype, width: int, device: Device) -> WidthConfigs:
    """The tiles of plain problems of a width."""
    rows = tables.HALF[max(size for size in tables.HALF if size <= memory_of(device))]
    if dtype is torch.float32:
        rows = (*tables.SINGLE_TF32X3 * (device.arch == "sm_90"), *tables.SINGLE)
    return next(row for row in rows if width <= row.width)


def fitted(row: WidthConfigs, problem: Problem, device: Device) -> WidthConfigs:
    """Smaller tiles for features that hold a tile of their own in shared memory or registers: in all kernels a bias,
    mask or score_mod with an element for every pair; in forward, whose tiles are the largest, any bias, dropout and
    ALiBi. Also for problems that are `misaligned`.
    """
    pair_tensors = [x for x in (problem.features.bias, problem.features.mask) if x is not None]
    of_pairs = reads_pairs(problem) or any(not (x[2] or x[3]) for x in pair_tensors)
    forward, dkdv, dq = row.forward, row.dkdv, row.dq
    if misaligned(problem, device):
        forward, dq = (x._replace(block_m=32, num_warps=4) for x in (forward, dq))
        dkdv = dkdv._replace(block_n=32, num_warps=4)
    room_for_pairs = problem.dtype is torch.float32 and row.width <= 128 and forward.precision == "ieee"  # in registers
    if (has_pairs(problem) or problem.dropout) and not room_for_pairs:
        forward = forward._replace(block_n=max(16, forward.block_n // 2))
    if of_pairs:
        dkdv = dkdv._replace(block_m=max(16, dkdv.block_m // 2))
        dq = dq._replace(block_n=max(16, dq.block_n // 2))
    return WidthConfigs(row.width, forward, dkdv, dq)


def is_biased(problem: Problem, device: Device) -> bool:
    """Whether a call of few features adds a bias for each pair to a plain one of more than a tile."""
    p = problem
    if p.batch_invariant or min(p.seqlen_q, p.seqlen_k) <= SHORT or is_decoding(p, large_groups=True):
        return False  # batch-invariant calls have tiles of no length
    return width_of(p) <= tables.BIASED.width and has_most(p.dtype, device) and adds_bias(p, device)


def adds_bias(problem: Problem, device: Device) -> bool:
    """Whether a bias for each pair is all that a call adds to a plain one."""
    p, bias = problem, problem.features.bias
    others = p.features._replace(bias=None) != NO_FEATURES or p.dropout or reads_pairs(p) or misaligned(p, device)
    return bias is not None and not (bias[2] or bias[3] or others)


def bias_bytes(problem: Problem, tile: KernelConfig) -> int:
    """Shared memory of a bias's blocks in flight, beside keys and values."""
    return (tile.num_stages - 1) * tile.block_m * tile.block_n * problem.dtype.itemsize


def by_tf32(tile: TileConfig) -> TileConfig:
    """The tiles for one TF32 product in place of six of bfloat16 parts."""
    products, backward = (x and BY_PYTORCH[False] for x in (tile.products, tile.products_backward))
    tile = tile._replace(products=products, products_backward=backward)
    if tile.dkdv.precision != "bf16x6":
        return tile
    return tile._replace(dkdv=tables.TF32_DKDV, dq=tables.SINGLE_TF32X3[0].dq)
