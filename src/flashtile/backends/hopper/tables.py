"""Tiles of the Hopper kernels, as measured on an H200."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from ...device import Device
from ...problem import Problem
from ..common.installed import triton_version

ROWS = 64  # of one warpgroup
COLUMNS = 64  # of dq, that one warpgroup computes
END = 2**30  # of the dimension in which packed rows are described to the copy engine
MANY_KEYS = 3072  # of a row, from which on wide tiles pay


class Compiled:
    """What is compiled into a kernel."""

    @property
    def cache_key(self) -> str:
        """By which Triton tells kernels apart on disk; without it by `str`, which is for people."""
        return repr(self)


@dataclass(frozen=True)
class Launch(Compiled):
    """One kernel's tile: `64 * consumers` query rows, `block_n` keys of `stages` blocks at a time, and how many
    registers a thread of each role has.
    """

    width: int  # head dimension
    block_n: int
    consumers: int
    stages: int
    consumer_registers: int
    copy_registers: int

    @property
    def block_m(self) -> int:
        return ROWS * self.consumers

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n} ({self.consumers} warpgroups, {self.stages} stages)"


@dataclass(frozen=True)
class BackwardLaunch(Compiled):
    """The backward kernel's tile: 128 keys, `block_m` query rows at a time in `stages`; and the order of its work
    (`backward_schedule`).
    """

    width: int
    block_m: int
    stages: int
    consumer_registers: int
    copy_registers: int
    downwards: bool
    block_n: int = 2 * ROWS

    def __str__(self) -> str:
        return f"{self.block_n} keys x {self.block_m} rows (2 warpgroups, {self.stages} stages)"


class Tile(NamedTuple):
    forward: Launch
    backward: BackwardLaunch


NARROW = {64: Launch(64, 128, 2, 3, 240, 24), 128: Launch(128, 128, 2, 2, 240, 24)}
WIDE = Launch(64, 128, 3, 2, 160, 32)  # reads keys less often, and wastes more at the diagonal
BACKWARD = {64: BackwardLaunch(64, 128, 2, 240, 24, False), 128: BackwardLaunch(128, 64, 2, 240, 24, False)}
WITHOUT_SPILLS = (3, 6)  # newer versions of Triton keep more in registers than WIDE has


def tile(problem: Problem, device: Device) -> Tile:
    features = problem.softcap or problem.alibi  # take more registers than three warpgroups have
    fits = triton_version() == WITHOUT_SPILLS and not features
    wide = problem.head_dim == WIDE.width and keys_of_a_row(problem) >= MANY_KEYS and fits
    backward = BACKWARD[problem.head_dim]
    longest_first = backward.block_m < backward.block_n and not problem.window.unlimited
    return Tile(
        WIDE if wide else NARROW[problem.head_dim],
        replace(backward, downwards=longest_first),
    )


def keys_of_a_row(problem: Problem) -> int:
    """How many keys a row sees, about."""
    window = problem.window
    keys = problem.seqlen_k
    if window.right is not None or window.top_left:
        keys //= 2
    if window.left is not None:
        keys = min(keys, window.left + 1 + (keys if window.right is None else window.right))
    return keys
