"""Families of problems and chips: what a tile may hold, and how its rows are copied."""

import torch

from ....call.device import Device
from ....call.problem import Problem
from ....expression.formula import Formula, loads_pairs

SHARED_MEMORY = {  # KiB that one program may take
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_120": 99,
    "sm_121": 99, "gfx942": 64, "gfx950": 160,
}  # fmt: skip
MIN_SHARED_MEMORY = 64
MOST_SHARED_MEMORY = 227  # of the chips whose configurations we measured
MIN_COPY_BYTES = 4  # of an asynchronous copy


def memory_of(device: Device) -> int:
    return SHARED_MEMORY.get(device.arch, MIN_SHARED_MEMORY)


def has_most(dtype: torch.dtype, device: Device) -> bool:
    """Whether the configurations are those of chips with the most shared memory, one of which we measured."""
    return dtype is not torch.float32 and memory_of(device) >= MOST_SHARED_MEMORY


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
