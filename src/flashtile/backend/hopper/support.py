"""Problems that the Hopper backend accepts, and the reasons why it declines the others."""

import functools
from typing import TYPE_CHECKING

import torch

from ...call.call import Needs
from ...call.device import Device
from ...call.problem import Problem, too_long
from ..gpu.archive import compiler_version
from ..gpu.installed import triton_version

if TYPE_CHECKING:
    from .tables import TileConfig

SUMMARY = "Gluon kernels for Hopper GPUs, the fastest there"
ARCHITECTURE = "sm_90"
HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))  # (of q and k, of v)
TMA_ALIGNMENT = 16  # bytes, of rows
MAX_DECODE_ROWS = 64
OLDEST, NEWEST = (3, 6), (3, 9)  # versions of Triton; Gluon is experimental and changes between them
VERIFIED = (3, 6)  # tested on a GPU


def unsupported() -> str | None:
    """Why the installed Triton cannot compile the kernels; `None` if it can."""
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
    """Why the backend does not run on this machine; `None` if it does."""
    if (reason := unsupported()) is not None:
        return reason
    if not torch.cuda.is_available():
        return "no GPU that PyTorch can use"
    if not any(torch.cuda.get_device_capability(n) == (9, 0) for n in range(torch.cuda.device_count())):
        return "no Hopper GPU (compute capability 9.0)"
    return None


def declines(problem: Problem, device: Device) -> str | None:
    """Why the backend does not support the problem; `None` if it does."""
    if device.arch != ARCHITECTURE:
        return f"its kernels are for Hopper GPUs ({ARCHITECTURE}), not for {device.arch}"
    if problem.dtype not in (torch.bfloat16, torch.float16):
        return "it supports bfloat16 and float16 inputs only"
    if problem.layout == "paged":
        return "it does not support paged KV caches"
    if head_dims(problem) not in HEAD_DIMS:
        accepted = [str(d) if d == d_v else f"{d} ({d_v} for v)" for d, d_v in HEAD_DIMS]
        return f"it supports head dimensions {', '.join(accepted[:-1])} and {accepted[-1]}"
    unsupported = [name for name in ("mask", "bias") if getattr(problem.features, name) is not None]
    unsupported += [name for name in ("score_mod", "dropout") if getattr(problem, name)]
    if unsupported:
        return f"it does not support {' or '.join(unsupported)}"
    if problem.alignment < TMA_ALIGNMENT:
        return f"TMA needs rows of q, k and v aligned to {TMA_ALIGNMENT} bytes"
    if min(problem.batch, problem.num_heads_q, problem.seqlen_q, problem.seqlen_k) == 0:
        return "the call is empty"
    return too_long(problem)


def head_dims(problem: Problem) -> tuple[int, int]:
    return problem.head_dim, problem.head_dim_v


def declines_backward(problem: Problem, device: Device, needs: Needs) -> str | None:
    """Why the backward pass does not support a problem that the forward pass supports."""
    if problem.softcap and problem.head_dim == 64:
        return "its backward pass is no faster with a softcap at head dimension 64"
    if needs.alibi_slopes:
        return "its backward pass has no gradient of ALiBi slopes"
    return None


def defers(problem: Problem, device: Device) -> str | None:
    """Why `auto` leaves a supported problem to the next backend."""
    version = compiler_version(device.arch)
    if version is not None and version != VERIFIED:
        tested, installed = dotted(VERIFIED), dotted(version)
        return f"its kernels are tested with Triton {tested} only, not {installed}; ask for it by name"
    if problem.softcap and problem.head_dim == 64:
        return "with a softcap at head dimension 64, exponentials take longer than these kernels can overlap"
    if problem.seqlen_q * problem.num_heads_q // problem.num_heads_kv <= MAX_DECODE_ROWS:
        return "decoding a few rows is faster with keys split among programs"
    return None


def tile(problem: Problem, device: Device) -> "TileConfig":
    """Kernel configurations for the problem."""
    from . import tables  # not needed by `import flashtile`

    return tables.tile_config(problem, device)


def num_splits(problem: Problem, device: Device) -> int:
    """Splits of the keys: always one, decoding is left to other backends."""
    return 1
