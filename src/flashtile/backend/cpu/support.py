"""What the CPU backend takes, why it declines the rest, and how large its tiles are."""

import functools
import importlib.util
import os
import platform
from typing import NamedTuple

import torch

from ...call.device import Device
from ...call.problem import Problem, too_long

SUMMARY = "LLVM kernels for CPUs, generated from Python: every feature but score_mod, head dimensions to 512"
MAX_HEAD_DIM = 512
VECTORS_VARIABLE = "FLASHTILE_CPU_VECTORS"
MACHINES = ("x86_64", "amd64", "arm64", "aarch64")
ROWS = 256  # of a task: as many as still leave its queries, outputs and a block of keys in the second-level cache
ROW_BYTES = 2**18
SPLIT_KEYS = 768  # keys of a split, at least
TARGET_TASKS = 32


class TileConfig(NamedTuple):
    """Query rows of a task, with the heads of a group packed, and keys of a block."""

    rows: int
    keys: int


@functools.cache
def unusable() -> str | None:
    """Why this backend does not run on this machine; `None` if it does."""
    if importlib.util.find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    if platform.machine().lower() not in MACHINES:
        return f"it has no kernels for {platform.machine()}"
    return None


def misconfigured() -> str | None:
    """Which vectors the environment asks for, and this machine does not have."""
    requested = os.environ.get(VECTORS_VARIABLE)
    if requested is None:
        return None
    from .targets import usable_widths  # asks LLVM

    usable = usable_widths()
    return (
        None
        if requested in usable
        else f"{VECTORS_VARIABLE} is {requested!r}. Accepted here: {', '.join(map(repr, usable))}"
    )


def declines(problem: Problem, device: Device) -> str | None:
    """Why this backend does not take the problem; `None` if it does."""
    if device.type != "cpu":
        return f"its kernels run on CPUs, not on {device.type}"
    if problem.score_mod is not None:
        return "it does not take a score_mod yet"
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return f"head dimensions go up to {MAX_HEAD_DIM}"
    return too_long(problem)


def tile(problem: Problem, device: Device) -> TileConfig:
    size = 8 if problem.dtype is torch.float64 else 4
    max_rows = ROW_BYTES // ((problem.head_dim + problem.head_dim_v) * size)
    rows = problem.seqlen_q * problem.num_heads_q // max(problem.num_heads_kv, 1)
    # A quarter of the rows at most, so that there are tasks to share out.
    return TileConfig(max(1, min(ROWS, max_rows, rows if rows <= 64 else max(64, rows // 4))), 96)


def num_splits(problem: Problem, device: Device) -> int:
    """Parts of the keys, when there are few rows. The number of threads has no say: it would change the result."""
    rows = problem.seqlen_q * problem.num_heads_q // max(problem.num_heads_kv, 1)
    if rows > 64:
        return 1
    tasks = max(problem.batch * problem.num_heads_kv, 1)
    return max(1, min(problem.seqlen_k // SPLIT_KEYS, TARGET_TASKS // tasks))
