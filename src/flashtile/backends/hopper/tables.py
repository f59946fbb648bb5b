"""Tiles of the Hopper kernels, as measured on an H200."""

from dataclasses import dataclass
from typing import NamedTuple

from ...device import Device
from ...problem import Problem

ROWS = 64  # of one warpgroup


@dataclass(frozen=True)
class Launch:
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


class Tile(NamedTuple):
    forward: Launch


FORWARD = {
    64: Launch(64, 128, 3, 2, 160, 32),
    128: Launch(128, 128, 2, 2, 240, 24),
}


def tile(problem: Problem, device: Device) -> Tile:
    return Tile(FORWARD[problem.head_dim])
