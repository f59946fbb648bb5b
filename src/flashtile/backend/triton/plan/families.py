"""Families of problems and chips: what a tile may hold, and how its rows are copied."""

import torch

from ....call.device import Device
from ....call.problem import Problem
from ....expression.formula import Formula, loads_pairs
from ...gpu.chips import MMA_SYNC, memory_of

MOST_SHARED_MEMORY = 227  # KB of the chips whose configurations we measured
ROOM = 163  # KiB for several blocks of keys
MIN_COPY_BYTES, MOST_COPY_BYTES = 4, 16  # bytes of an asynchronous copy


def width_of(problem: Problem) -> int:
    return max(problem.head_dim, problem.head_dim_v)


def has_most(dtype: torch.dtype, device: Device) -> bool:
    """Whether the configurations are for chips with the most shared memory; we measured one."""
    return dtype is not torch.float32 and memory_of(device) >= MOST_SHARED_MEMORY


def has_room(dtype: torch.dtype, device: Device) -> bool:
    """Whether a tile of few rows has room for several blocks of keys."""
    return dtype is not torch.float32 and memory_of(device) >= ROOM


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


def needs_room(problem: Problem, device: Device) -> bool:
    """Whether a tile may need more shared memory than in the plain problems whose tiles are in `plan.tables`."""
    return misaligned(problem, device) or problem.dropout or has_pairs(problem) or problem.pages is not None


def misaligned(problem: Problem, device: Device) -> bool:
    """Whether rows cannot be copied asynchronously on Hopper. There, ptxas 12.8 miscompiles some warpgroup products of
    such tiles (`tests/offline` detects it); tiles of 32 rows have none.
    """
    return problem.alignment < MIN_COPY_BYTES and device.arch == "sm_90"


def takes_mma(problem: Problem, device: Device) -> bool:
    """Whether the kernels of `kernels.mma` run a problem: they copy whole vectors of 16-bit numbers, and have no
    dropout and no pages.
    """
    p = problem
    whole = p.alignment == MOST_COPY_BYTES and p.head_dim % 8 == 0 and p.head_dim_v % 8 == 0
    known = device.type == "cuda" and device.arch in MMA_SYNC and p.dtype is not torch.float32
    return known and whole and p.pages is None and not p.dropout
