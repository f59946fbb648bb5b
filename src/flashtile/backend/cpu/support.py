"""Planning for the CPU backend, without LLVM: which problems it supports, tile sizes, splits."""

import functools
import importlib.metadata
import platform
import re

import torch

from ...call.call import Needs
from ...call.device import Device
from ...call.eight_bit import PACKED, READS_A_COPY
from ...call.plan import Candidate
from ...call.problem import Problem, declines_second, too_long
from .targets import misconfigured
from .tile_config import TileConfig

__all__ = ["declines_second", "misconfigured"]  # which other files have

SUMMARY = "LLVM kernels for CPUs, generated from Python: every feature, head dimensions to 576"
MAX_HEAD_DIM = 576
OLDEST_LLVMLITE = (0, 45)  # before, pointers have types
MACHINES = ("x86_64", "amd64", "arm64", "aarch64")
# Query rows of a task: as many as leave its queries, its outputs and a block of keys in the second-level cache.
ROWS = 256
ROW_BYTES = 2**18
SPLIT_KEYS = 384  # least keys of a split
INVARIANT_KEYS = 768  # keys of a split of a batch-invariant call, counted from the first one
TARGET_TASKS = 32
SHARED_TASKS = 256  # tasks of a call, which the threads of a large machine share evenly enough


FEW_BYTES = 32  # half of the widest vector: if a task's scores of one key are more, lanes over features save nothing
NO_RIVAL = 256  # head dimension up to which `tiled` is slower (`tests/backend/cpu/test_cpu_cost.py`)


@functools.cache
def unusable() -> str | None:
    """The reason why this backend cannot run on this machine; `None` if it can."""
    try:
        installed = importlib.metadata.version("llvmlite")  # without importing it
    except importlib.metadata.PackageNotFoundError:
        return "llvmlite is not installed"
    if tuple(int(x) for x in re.findall(r"\d+", installed)[:2]) < OLDEST_LLVMLITE:
        needed = ".".join(map(str, OLDEST_LLVMLITE))
        return f"llvmlite {installed} is installed, and it needs {needed} or newer"
    if platform.machine().lower() not in MACHINES:
        return f"it has no kernels for {platform.machine()}"
    return None


def declines(problem: Problem, device: Device) -> str | None:
    """The reason why this backend does not support the problem; `None` if it does."""
    if device.type != "cpu":
        return f"its kernels run on CPUs, not on {device.type}"
    if problem.eight_bit == PACKED:
        return READS_A_COPY
    if (reason := problem.untraced) is not None:
        return reason
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return f"head dimensions go up to {MAX_HEAD_DIM}"
    return too_long(problem)


def candidates(problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
    """The ways to run a pass, the fastest first. Where nothing else on a CPU is faster, times are relative to the first
    one's; where there is one way, too, no time is asked for.
    """
    ways = ways_of(problem, needs)
    if has_rival(problem):
        return timed_candidates(problem, device, needs)
    if len(ways) == 1:
        return [Candidate(ways[0], num_splits(problem), 0.0)]
    found = timed_candidates(problem, device, needs)
    return [x._replace(microseconds=x.microseconds - found[0].microseconds) for x in found]


def timed_candidates(problem: Problem, device: Device, needs: Needs | None) -> list[Candidate]:
    """As `candidates`, with the expected time of each."""
    from ..cpu_cost import time  # not needed otherwise

    found = [Candidate(way, num_splits(problem), time(problem, way, needs)) for way in ways_of(problem, needs)]
    return sorted(found, key=lambda x: x.microseconds)


def ways_of(problem: Problem, needs: Needs | None) -> list[TileConfig]:
    """One way, or both kernels for a few rows."""
    plain = tile(problem)
    both = plain.decodes and needs is None and not problem.batch_invariant
    return [plain, plain._replace(decodes=False)] if both else [plain]


def has_rival(problem: Problem) -> bool:
    """Whether `tiled` may be faster: in float64, by PyTorch's products of wide heads; not over pages or caches,
    which it copies first.
    """
    wide = max(problem.head_dim, problem.head_dim_v) > NO_RIVAL
    return problem.dtype is torch.float64 and wide and problem.layout != "paged"


def tangent_candidates(problem: Problem, device: Device, moves: Needs) -> list[Candidate]:
    """The one way to run a forward pass with tangents. A task has queries, outputs, and as many tangents."""
    return [Candidate(tile(problem, copies=2), 1, 0.0)]


def second_candidates(problem: Problem, device: Device, moves: Needs, needs: Needs) -> list[Candidate]:
    """The one way to compute a second derivative, after a forward pass with tangents."""
    return [Candidate(tile(problem, copies=2), 1, 0.0)]


def tile(problem: Problem, copies: int = 1) -> TileConfig:
    size = 8 if problem.dtype is torch.float64 else 4
    max_rows = ROW_BYTES // ((problem.head_dim + problem.head_dim_v) * size * copies)
    rows = problem.seqlen_q * problem.num_heads_q // max(problem.num_heads_kv, 1)
    # At least four tasks for each key head, so that threads can share them. In bfloat16 each task converts or packs all
    # keys, which costs the more the fewer rows it has: fewer tasks where many heads have enough of them.
    parts = 4
    if problem.dtype is torch.bfloat16:
        parts = min(parts, -(-SHARED_TASKS // max(problem.batch * problem.num_heads_kv, 1)))
    queries = ("one" if problem.decodes else "several") if problem.batch_invariant else None
    rows_of_task = max(1, min(ROWS, max_rows, rows if rows <= 64 else max(64, rows // parts)))
    decodes = queries != "several" and rows_of_task * size <= FEW_BYTES
    return TileConfig(rows_of_task, 96, queries, decodes)


def num_splits(problem: Problem) -> int:
    """Splits of the keys, for few query rows. Independent of the number of threads, so that results are too."""
    if problem.batch_invariant:
        return -(-problem.seqlen_k // INVARIANT_KEYS) if problem.decodes else 1
    rows = problem.seqlen_q * problem.num_heads_q // max(problem.num_heads_kv, 1)
    if rows > 64:
        return 1
    tasks = max(problem.batch * problem.num_heads_kv, 1)
    return max(1, min(problem.seqlen_k // SPLIT_KEYS, TARGET_TASKS // tasks))
