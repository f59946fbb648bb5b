"""What the Hopper backend takes, and why it declines the rest."""

import functools
from typing import TYPE_CHECKING

import torch

from ...call.call import Needs
from ...call.device import Device
from ...call.problem import Problem, too_long
from ..gpu.installed import triton_version

if TYPE_CHECKING:
    from .tables import TileConfig

SUMMARY = "Gluon kernels for Hopper GPUs, the fastest there"
ARCHITECTURE = "sm_90"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))  # of q and v
TMA_ALIGNMENT = 16  # bytes, of every row that the copy engine reads
MAX_DECODE_ROWS = 64
OLDEST, NEWEST = (3, 6), (3, 9)  # versions of Triton, whose Gluon is experimental
VERIFIED = (3, 6)  # on a GPU


def unsupported() -> str | None:
    """Why the installed Triton cannot compile these kernels; `None` if it can."""
    version = triton_version()
    if version is None:
        return "triton is not installed (PyTorch's GPU builds bring it)"
    if not OLDEST <= version <= NEWEST:
        return f"its kernels are for Triton {dotted(OLDEST)} to {dotted(NEWEST)}; this is {dotted(version)}"
    return None


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@functools.cache
def unusable() -> str | None:
    """Why this backend does not run on this machine; `None` if it does."""
    if (reason := unsupported()) is not None:
        return reason
    if not torch.cuda.is_available():
        return "no GPU that PyTorch can use"
    if not any(torch.cuda.get_device_capability(n) == (9, 0) for n in range(torch.cuda.device_count())):
        return "no Hopper GPU (compute capability 9.0)"
    return None


def declines(problem: Problem, device: Device) -> str | None:
    """Why this backend does not take the problem; `None` if it does."""
    if device.arch != ARCHITECTURE:
        return f"its kernels are for Hopper GPUs ({ARCHITECTURE}), not for {device.arch}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "it computes with bfloat16 and float16 inputs"
    if problem.layout == "paged":
        return "it does not take pages"
    if head_dims(problem) not in HEAD_DIMS:
        accepted = [str(d) if d == d_v else f"{d} with values of {d_v}" for d, d_v in HEAD_DIMS]
        return f"head dimensions are {', '.join(accepted[:-1])} or {accepted[-1]}"
    features = ("mask", "bias", "score_mod", "dropout")
    if (unsupported := [name for name in features if getattr(problem, name)]) != []:
        return f"it does not take {' or '.join(unsupported)}"
    if problem.alignment < TMA_ALIGNMENT:
        return f"rows of q, k and v have to lie on {TMA_ALIGNMENT} bytes for the copy engine"
    if min(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k) == 0:
        return "the call is empty"
    return too_long(problem)


def head_dims(problem: Problem) -> tuple[int, int]:
    return problem.head_dim, problem.head_dim_v


def declines_backward(problem: Problem, device: Device, needs: Needs) -> str | None:
    """Why its backward pass does not take a problem that its forward pass does."""
    if problem.softcap and problem.head_dim == 64:
        return "its backward pass is no faster with a softcap at head dimension 64"
    if needs.alibi_slopes:
        return "its backward pass has no gradient of ALiBi slopes"
    return None


def defers(problem: Problem, device: Device) -> str | None:
    """Why `auto` leaves a problem to the next backend that this one could take."""
    version = triton_version()
    if version is not None and version != VERIFIED:
        return f"its kernels have run with Triton {dotted(VERIFIED)} only, not {dotted(version)}; ask for it by name"
    if problem.softcap and problem.head_dim == 64:
        return "a softcap at head dimension 64 takes exponential units longer than these kernels can hide"
    if problem.seqlen_q * problem.num_heads_q // problem.num_heads_kv <= MAX_DECODE_ROWS:
        return "a few rows are decoded faster with the keys split among programs"
    return None


def tile(problem: Problem, device: Device) -> "TileConfig":
    from . import tables  # `import flashtile` does without them

    return tables.tile_config(problem, device)


def num_splits(problem: Problem, device: Device) -> int:
    """Keys are taken in order, in one part."""
    return 1
