"""Tiles for each family of problems and chips, as measured or, where we have no such chip, as they fit.

A chip's family follows from the shared memory that one program may take, and from how its matrix units are fed.
"""

from typing import NamedTuple

import torch

from ...device import Device
from ...problem import Problem, power_of_two
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
LEAST_KEYS = 128  # of one part of a split row


def tile(problem: Problem, device: Device) -> Tile:
    row = row_of(problem, device)
    group = problem.num_heads_q // max(problem.num_heads_kv, 1)
    packed_rows = max(problem.seqlen_q, 1) * group
    if packed_rows > MOST_PACKED_ROWS:
        row = row if needs_room(problem, device) else tuned_row(row, problem.dtype, device)
        return Tile(row.forward, row.dkdv, row.dq)
    return Tile(decoding(row, packed_rows), row.dkdv, row.dq, pack=group)


def decoding(row: Row, packed_rows: int) -> Launch:
    """Few rows: reading keys is all the work, so that tiles are small enough for two programs on a core."""
    given = row.forward
    block_n = min(given.block_n, max(16, KEYS_TIMES_WIDTH // row.width))
    return Launch(max(16, power_of_two(packed_rows)), block_n, 4, given.num_stages)


def row_of(problem: Problem, device: Device) -> Row:
    if device.type == "cpu":
        return INTERPRETER
    return fitted(shipped(problem.dtype, max(problem.head_dim, problem.head_dim_v), device), problem, device)


def shipped(dtype: torch.dtype, width: int, device: Device) -> Row:
    """The kernels for plain problems of a width."""
    table = SINGLE if dtype is torch.float32 else HALF
    memory = SHARED_MEMORY.get(device.arch, SMALLEST)
    rows = table[max(size for size in table if size <= memory)]
    return next(row for row in rows if width <= row.width)


def needs_room(problem: Problem, device: Device) -> bool:
    """Whether a problem may want more shared memory for a tile than the plain ones, on which tiles are tuned."""
    misaligned = problem.alignment < LEAST_COPY and device.arch == "sm_90"
    given = (problem.bias, problem.mask, problem.page_size)
    return misaligned or problem.dropout or problem.alibi or any(x is not None for x in given)


def tuned_row(row: Row, dtype: torch.dtype, device: Device) -> Row:
    """The row with what `flashtile tune` has found for it on this machine."""
    found = tuned.launches(device, family(dtype), row.width) if device.type == "cuda" else {}
    return row._replace(**{kernel: Launch(*numbers, tuned=True) for kernel, numbers in found.items()})


def family(dtype: torch.dtype) -> str:
    return "single" if dtype is torch.float32 else "half"


def fitted(row: Row, problem: Problem, device: Device) -> Row:
    """Smaller tiles for features that hold a tile of their own in shared memory or registers: a bias or mask for every
    pair in all kernels, any bias, dropout and ALiBi in forward, whose tiles are the largest.

    And, on Hopper, for rows that cannot be copied asynchronously: ptxas miscompiles some warpgroup products of such
    tiles (`tests/offline` looks for that), and tiles of 32 rows do without.
    """
    given = [x for x in (problem.bias, problem.mask) if x is not None]
    of_pairs = any(not (x[2] or x[3]) for x in given)
    forward, dkdv, dq = row.forward, row.dkdv, row.dq
    if problem.alignment < LEAST_COPY and device.arch == "sm_90":
        forward, dq = (x._replace(block_m=32, num_warps=4) for x in (forward, dq))
        dkdv = dkdv._replace(block_n=32, num_warps=4)
    if given or problem.dropout or problem.alibi:
        forward = forward._replace(block_n=max(16, forward.block_n // 2))
    if of_pairs:
        dkdv = dkdv._replace(block_m=max(16, dkdv.block_m // 2))
        dq = dq._replace(block_n=max(16, dq.block_n // 2))
    return Row(row.width, forward, dkdv, dq)


def num_splits(problem: Problem, device: Device) -> int:
    """Parts that the keys of a row are split into, so that few rows still fill the chip."""
    chosen = tile(problem, device)
    blocks = -(-max(problem.seqlen_q, 1) * chosen.pack // chosen.forward.block_m)
    programs = max(1, blocks * problem.num_heads_q // chosen.pack * problem.batch)
    wanted = device.cores // programs
    return max(1, min(wanted, problem.seqlen_k // LEAST_KEYS))
