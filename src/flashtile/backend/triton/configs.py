"""Tiles for each family of problems and chips, as measured or, where we have no such chip, as they fit.

A chip's family follows from the shared memory that one program may take, and from how its matrix units are fed.
"""

from typing import NamedTuple

import torch

from ...call.device import Device
from ...call.problem import Problem, power_of_two
from . import tuned


class KernelConfig(NamedTuple):
    """One kernel's tile of query rows and keys, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tuned: bool = False  # found by `flashtile tune` on this machine

    def __str__(self) -> str:
        tuned = ", tuned on this machine" * self.tuned
        return f"{self.block_m} x {self.block_n} ({self.num_warps} warps, {self.num_stages} stages{tuned})"


class TileConfig(NamedTuple):
    """The kernels of one problem; `pack_gqa` query heads of a group are rows of one tile of forward."""

    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig
    pack_gqa: int = 1


class WidthConfigs(NamedTuple):
    """The kernels for head dimensions up to `width`."""

    width: int
    forward: KernelConfig
    dkdv: KernelConfig
    dq: KernelConfig


KIB = 1024
SHARED_MEMORY = {  # KiB that one program may take
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "sm_121": 99, "gfx942": 64, "gfx950": 160,
}  # fmt: skip
SMALLEST = 64

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
INTERPRETER = WidthConfigs(512, *(KernelConfig(16, 16, 4, 1),) * 3)
MIN_COPY_BYTES = 4  # bytes
MAX_PACKED_ROWS = 64  # query rows of a group that become one tile
KEYS_TIMES_WIDTH = 8192  # of a tile that decodes
SHORT_WINDOW = 2048  # keys of a row, of which a large tile would mask much
SMALL = KernelConfig(64, 64, 4, 3)  # two programs on a Hopper core, up to width 128
MIN_SPLIT_KEYS = 64  # of one part of a split row


def tile(problem: Problem, device: Device) -> TileConfig:
    row = row_of(problem, device)
    group = problem.num_heads_q // max(problem.num_heads_kv, 1)
    packed_rows = max(problem.seqlen_q, 1) * group
    if packed_rows > MAX_PACKED_ROWS:
        if not needs_room(problem, device):
            found = tuned_row(row, problem.dtype, device)
            row = found._replace(forward=row.forward) if wants_small(problem, row, device) else found
        return TileConfig(row.forward, row.dkdv, row.dq)
    return TileConfig(decoding(row, packed_rows, problem, device), row.dkdv, row.dq, pack_gqa=group)


def decoding(row: WidthConfigs, packed_rows: int, problem: Problem, device: Device) -> KernelConfig:
    """Few rows: reading keys is all the work, so that tiles are small enough for two programs on a core.

    Where shared memory is largest and nothing else wants it, three blocks of keys and values are on their way while
    one is used: on an H200, that is within 1.5% of the best tile for any batch and length measured. Larger blocks gain
    that where rows are split or long and lose 5% where they are neither, but lengths may not choose: with a number of
    splits given, a sequence's bits depend neither on the batch nor on how long that is.
    """
    given, block_n = row.forward, max(16, KEYS_TIMES_WIDTH // row.width)
    block_m = max(16, power_of_two(packed_rows))
    if misaligned(problem, device):
        block_m = min(block_m, given.block_m)
    widths = problem.head_dim, problem.head_dim_v
    asynchronous = all(n * problem.dtype.itemsize % MIN_COPY_BYTES == 0 for n in widths)  # not of where a batch lies
    if has_most(problem.dtype, device) and asynchronous and not (has_pairs(problem) or problem.dropout):
        return KernelConfig(block_m, block_n, 4, 4)
    return KernelConfig(block_m, min(given.block_n, block_n), 4, given.num_stages)


def row_of(problem: Problem, device: Device) -> WidthConfigs:
    if device.type == "cpu":
        return INTERPRETER
    return fitted(shipped(problem.dtype, max(problem.head_dim, problem.head_dim_v), device), problem, device)


def shipped(dtype: torch.dtype, width: int, device: Device) -> WidthConfigs:
    """The kernels for plain problems of a width."""
    table = SINGLE if dtype is torch.float32 else HALF
    rows = table[max(size for size in table if size <= memory_of(device))]
    return next(row for row in rows if width <= row.width)


def memory_of(device: Device) -> int:
    return SHARED_MEMORY.get(device.arch, SMALLEST)


def has_pairs(problem: Problem) -> bool:
    """Whether scores take numbers of their own for pairs."""
    return problem.bias is not None or problem.mask is not None or problem.alibi


def has_most(dtype: torch.dtype, device: Device) -> bool:
    """Whether tiles are those of the chips with the most shared memory, of which we measure one."""
    return dtype is not torch.float32 and memory_of(device) >= max(HALF)


def needs_room(problem: Problem, device: Device) -> bool:
    """Whether a problem may want more shared memory for a tile than the plain ones, on which tiles are tuned."""
    return misaligned(problem, device) or problem.dropout or has_pairs(problem) or problem.page_size is not None


def misaligned(problem: Problem, device: Device) -> bool:
    """Whether rows cannot be copied asynchronously on Hopper, where ptxas miscompiles some warpgroup products of such
    tiles (`tests/offline` looks for that): tiles of 32 rows do without.
    """
    return problem.alignment < MIN_COPY_BYTES and device.arch == "sm_90"


def tuned_row(row: WidthConfigs, dtype: torch.dtype, device: Device) -> WidthConfigs:
    """The row with what `flashtile tune` has found for it on this machine."""
    found = tuned.launches(device, family(dtype), row.width) if device.type == "cuda" else {}
    return row._replace(**{kernel: KernelConfig(*numbers, tuned=True) for kernel, numbers in found.items()})


def family(dtype: torch.dtype) -> str:
    return "single" if dtype is torch.float32 else "half"


def fitted(row: WidthConfigs, problem: Problem, device: Device) -> WidthConfigs:
    """Smaller tiles for features that hold a tile of their own in shared memory or registers: a bias or mask for every
    pair in all kernels, any bias, dropout and ALiBi in forward, whose tiles are the largest. Or one that suits them
    (`wants_small`), and for rows that are `misaligned`.
    """
    given = [x for x in (problem.bias, problem.mask) if x is not None]
    of_pairs = any(not (x[2] or x[3]) for x in given)
    small = wants_small(problem, row, device)
    forward, dkdv, dq = SMALL if small else row.forward, row.dkdv, row.dq
    if misaligned(problem, device):
        forward, dq = (x._replace(block_m=32, num_warps=4) for x in (forward, dq))
        dkdv = dkdv._replace(block_n=32, num_warps=4)
    room_for_pairs = problem.dtype is torch.float32 and row.width <= 128  # in registers
    if (has_pairs(problem) or problem.dropout) and not small and not room_for_pairs:
        forward = forward._replace(block_n=max(16, forward.block_n // 2))
    if of_pairs:
        dkdv = dkdv._replace(block_m=max(16, dkdv.block_m // 2))
        dq = dq._replace(block_n=max(16, dq.block_n // 2))
    return WidthConfigs(row.width, forward, dkdv, dq)


def wants_small(problem: Problem, row: WidthConfigs, device: Device) -> bool:
    """Whether forward has much to do beside its products: numbers of a softcap or dropout for every pair, or masks in
    most blocks, as short windows have. Then two programs on a core, of which one multiplies while the other does that,
    are faster than one large tile (H200, width 128: +14%, +2%, +17%).
    """
    left, right, _ = problem.window
    short = left is not None and right is not None and left + right <= SHORT_WINDOW
    measured = has_most(problem.dtype, device) and 64 < row.width <= 128
    return measured and not has_pairs(problem) and (problem.softcap or problem.dropout or short)


def num_splits(problem: Problem, device: Device) -> int:
    """Parts that the keys of a row are split into, so that few rows still fill the chip."""
    chosen = tile(problem, device)
    blocks = -(-max(problem.seqlen_q, 1) * chosen.pack_gqa // chosen.forward.block_m)
    programs = max(1, blocks * problem.num_heads_q // chosen.pack_gqa * problem.batch)
    wanted = device.cores // programs
    return max(1, min(wanted, problem.seqlen_k // MIN_SPLIT_KEYS))
