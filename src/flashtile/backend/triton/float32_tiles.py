"""Tiles of float32 products on Hopper, chosen by a count of whole waves: large ones leave cores idle in short calls."""

from typing import NamedTuple

from ...call.device import Device
from ...call.problem import Problem
from .tile_config import KernelConfig, WidthConfigs

TF32, PARTS = "tf32x3", "bf16x6"
LARGE = KernelConfig(128, 64, 8, 1, precision=TF32)  # forward and dq: one program fills the registers of a core
SPLIT_DQ = KernelConfig(128, 64, 8, 2, precision=PARTS)
SMALLER = {  # than these, for forward and dq
    LARGE: KernelConfig(64, 64, 4, 1, precision=TF32),
    SPLIT_DQ: KernelConfig(64, 64, 4, 1, precision=PARTS),
}
SMALLEST = {  # with FULL features
    "forward": KernelConfig(32, 64, 4, 1, precision=TF32),
    "dq": KernelConfig(32, 32, 4, 1, precision=TF32),
}
DKDV, NARROW_DKDV = KernelConfig(32, 32, 4, 1, precision=TF32), KernelConfig(32, 64, 4, 1, precision=TF32)
NARROW, FULL = 32, 64  # features
GAIN = 0.95  # of the large tile's time, below which a smaller one is taken: plans round rows up


class Times(NamedTuple):
    """Times of one program on a core, and of two at once, in units of a large tile's (H100)."""

    alone: float
    two: float


TIMES = {128: Times(1.0, 2.0), 64: Times(0.8, 1.2), 32: Times(0.72, 0.75)}  # by rows of a tile


def filling(row: WidthConfigs, problem: Problem, device: Device) -> WidthConfigs:
    """The configurations of a plain dense call, of which some have smaller tiles (docs/journal/2026-11-26-forms.md)."""
    narrow = max(problem.head_dim, problem.head_dim_v) <= NARROW
    dkdv = NARROW_DKDV if narrow and row.dkdv == DKDV else row.dkdv
    forward, dq = (fastest(getattr(row, kernel), kernel, problem, device) for kernel in ("forward", "dq"))
    return row._replace(forward=forward, dkdv=dkdv, dq=dq)


def fastest(config: KernelConfig, kernel: str, problem: Problem, device: Device) -> KernelConfig:
    """The configuration of a kernel, or a smaller one."""
    if config not in SMALLER:
        return config
    full = problem.head_dim == problem.head_dim_v == FULL
    smaller = [SMALLER[config]] + ([SMALLEST[kernel]] if config == LARGE and full else [])
    best = min(smaller, key=lambda x: time(x, problem, device))
    return best if time(best, problem, device) < GAIN * time(config, problem, device) else config


def time(config: KernelConfig, problem: Problem, device: Device) -> float:
    """Time of the busiest core."""
    rows, heads = problem.counts.rows, problem.counts.batch * problem.num_heads_q
    programs = -(-heads * -(-rows // config.block_m) // device.cores)
    times = TIMES[config.block_m]
    return programs // 2 * times.two + programs % 2 * times.alone
