"""Tiles for each family of problems and chips, as measured or, where we have no such chip, as they fit.

A chip's family follows from the shared memory that one program may take, and from how its matrix units are fed.
"""

from typing import NamedTuple

import torch

from ...call.device import Device
from ...call.problem import Problem, power_of_two
from . import tuned


class Launch(NamedTuple):
    """One kernel's tile of query rows and keys, and how it is run."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tuned: bool = False  # found by `flashtile tune` on this machine

    def __str__(self) -> str:
        tuned = ", tuned on this machine" * self.tuned
        return f"{self.block_m} x {self.block_n} ({self.num_warps} warps, {self.num_stages} stages{tuned})"


class Tile(NamedTuple):
    """The kernels of one problem; `pack` query heads of a group are rows of one tile of forward."""

    forward: Launch
    dkdv: Launch
    dq: Launch
    pack: int = 1


class Row(NamedTuple):
    """The kernels for head dimensions up to `width`."""

    width: int
    forward: Launch
    dkdv: Launch
    dq: Launch


KIB = 1024
SHARED_MEMORY = {  # KiB that one program may take
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "sm_121": 99, "gfx942": 64, "gfx950": 160,
}  # fmt: skip
SMALLEST = 64

HALF = {  # float16 and bfloat16, by shared memory
    227: (
        Row(64, Launch(64, 64, 4, 3), Launch(64, 64, 4, 3), Launch(128, 64, 4, 3)),
        Row(128, Launch(128, 128, 8, 3), Launch(32, 128, 8, 3), Launch(128, 64, 8, 3)),
        Row(256, Launch(128, 64, 8, 2), Launch(64, 64, 8, 1), Launch(128, 32, 8, 2)),
        Row(512, Launch(64, 32, 8, 2), Launch(32, 32, 8, 1), Launch(64, 16, 8, 1)),
    ),
    99: (
        Row(64, Launch(128, 64, 4, 3), Launch(64, 64, 4, 2), Launch(64, 64, 4, 2)),
        Row(128, Launch(64, 64, 4, 2), Launch(32, 64, 4, 2), Launch(64, 32, 4, 2)),
        Row(256, Launch(64, 32, 4, 2), Launch(32, 32, 4, 1), Launch(32, 32, 4, 1)),
        Row(512, Launch(32, 16, 4, 1), Launch(16, 16, 4, 1), Launch(16, 16, 4, 1)),
    ),
    64: (
        Row(64, Launch(128, 64, 4, 1), Launch(64, 64, 4, 1), Launch(64, 64, 4, 1)),
        Row(128, Launch(64, 64, 4, 1), Launch(32, 64, 4, 1), Launch(64, 32, 4, 1)),
        Row(256, Launch(64, 32, 4, 1), Launch(16, 32, 4, 1), Launch(32, 16, 4, 1)),
        Row(512, Launch(16, 16, 4, 1), Launch(16, 16, 4, 1), Launch(16, 16, 4, 1)),
    ),
}
SINGLE = {  # float32; exact products have no matrix units, so registers bound the tiles
    64: (
        Row(64, Launch(64, 32, 8, 1), Launch(32, 32, 8, 1), Launch(32, 32, 8, 1)),
        Row(128, Launch(32, 32, 8, 1), Launch(16, 32, 8, 1), Launch(32, 16, 8, 1)),
        Row(256, Launch(16, 32, 8, 1), Launch(16, 16, 8, 1), Launch(16, 16, 8, 1)),
        Row(512, Launch(16, 16, 8, 1), Launch(16, 16, 8, 1), Launch(16, 16, 8, 1)),
    ),
}
INTERPRETER = Row(512, *(Launch(16, 16, 4, 1),) * 3)
LEAST_COPY = 4  # bytes
MOST_PACKED_ROWS = 64  # query rows of a group that become one tile
KEYS_TIMES_WIDTH = 8192  # of a tile that decodes
SHORT_WINDOW = 2048  # keys of a row, of which a large tile would mask much
SMALL = Launch(64, 64, 4, 3)  # two programs on a Hopper core, up to width 128
LEAST_KEYS = 64  # of one part of a split row


def tile(problem: Problem, device: Device) -> Tile:
    row = row_of(problem, device)
    group = problem.num_heads_q // max(problem.num_heads_kv, 1)
    packed_rows = max(problem.seqlen_q, 1) * group
    if packed_rows > MOST_PACKED_ROWS:
        if not needs_room(problem, device):
            found = tuned_row(row, problem.dtype, device)
            row = found._replace(forward=row.forward) if wants_small(problem, row, device) else found
        return Tile(row.forward, row.dkdv, row.dq)
    return Tile(decoding(row, packed_rows, problem, device), row.dkdv, row.dq, pack=group)


def decoding(row: Row, packed_rows: int, problem: Problem, device: Device) -> Launch:
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
    asynchronous = all(n * problem.dtype.itemsize % LEAST_COPY == 0 for n in widths)  # not of where a batch lies
    if has_most(problem.dtype, device) and asynchronous and not (has_pairs(problem) or problem.dropout):
        return Launch(block_m, block_n, 4, 4)
    return Launch(block_m, min(given.block_n, block_n), 4, given.num_stages)


def row_of(problem: Problem, device: Device) -> Row:
    if device.type == "cpu":
        return INTERPRETER
    return fitted(shipped(problem.dtype, max(problem.head_dim, problem.head_dim_v), device), problem, device)


def shipped(dtype: torch.dtype, width: int, device: Device) -> Row:
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
    return problem.alignment < LEAST_COPY and device.arch == "sm_90"


def tuned_row(row: Row, dtype: torch.dtype, device: Device) -> Row:
    """The row with what `flashtile tune` has found for it on this machine."""
    found = tuned.launches(device, family(dtype), row.width) if device.type == "cuda" else {}
    return row._replace(**{kernel: Launch(*numbers, tuned=True) for kernel, numbers in found.items()})


def family(dtype: torch.dtype) -> str:
    return "single" if dtype is torch.float32 else "half"


def fitted(row: Row, problem: Problem, device: Device) -> Row:
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
    return Row(row.width, forward, dkdv, dq)


def wants_small(problem: Problem, row: Row, device: Device) -> bool:
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
    blocks = -(-max(problem.seqlen_q, 1) * chosen.pack // chosen.forward.block_m)
    programs = max(1, blocks * problem.num_heads_q // chosen.pack * problem.batch)
    wanted = device.cores // programs
    return max(1, min(wanted, problem.seqlen_k // LEAST_KEYS))
