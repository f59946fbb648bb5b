"""Skip this file when you learn: checks before the launch of step 9's last kernel, and Gluon in a form that can be
imported without Triton. Gluon is experimental: where two versions of Triton have two names, both are here.
"""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .triton_or_not import INSTALLED, TritonUnavailableError

gluon: Any
gl: Any
hopper: Any
TensorDescriptor: Any
try:
    gluon, gl = import_module("triton.experimental.gluon"), import_module("triton.experimental.gluon.language")
    hopper = import_module("triton.experimental.gluon.language.nvidia.hopper")
    TensorDescriptor = import_module("triton.experimental.gluon.nvidia.hopper").TensorDescriptor
except ImportError:  # no Triton, or one before Gluon
    gluon, gl, hopper = (
        SimpleNamespace(jit=lambda function: function),
        SimpleNamespace(constexpr=int),
        SimpleNamespace(),
    )
    TensorDescriptor = None

tma: Any = getattr(hopper, "tma", None)  # of one tile; the second names are those of Triton 3.6
tma_load: Any = getattr(tma, "async_load", None) or getattr(tma, "async_copy_global_to_shared", None)
tma_store: Any = getattr(tma, "async_store", None) or getattr(tma, "async_copy_shared_to_global", None)

HEAD_DIMS, DTYPES = (64, 128), (torch.float16, torch.bfloat16)


def hopper_problem(device: torch.device) -> str | None:
    """Why step 9's last kernel does not run on the device; `None` if it does."""
    if not INSTALLED or tma_load is None:
        return "step 9's last kernel is Gluon, a part of Triton from 3.6 on: `pip install triton`"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return (
            f"the tensors are on {device}, and step 9's last kernel has instructions of Hopper GPUs alone (H100, H200, "
            "compute capability 9.0); step09_cuda_stages runs from 8.0 on, and with --emulate on a CPU"
        )
    return None


def check_hopper(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Refuse a launch that would fail.

    Raises:
        TritonUnavailableError: no Hopper GPU holds the tensors, or there is no Gluon.
        ValueError: shapes, a dtype or a scale that this step does not take.
    """
    if (problem := hopper_problem(q.device)) is not None:
        raise TritonUnavailableError(problem)
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.ndim not in (2, 4) or len(set(shapes)) != 1 or q.shape[-1] not in HEAD_DIMS or q.numel() == 0:
        raise ValueError(f"q, k, v are {shapes}; this step takes [N, d] or [B, heads, N, d] for all, d in {HEAD_DIMS}")
    if {x.dtype for x in (q, k, v)} not in ({dtype} for dtype in DTYPES):
        raise ValueError(f"q, k, v are {[x.dtype for x in (q, k, v)]}; this step takes float16 or bfloat16 for all")
    if not scale > 0:
        raise ValueError(f"scale={scale}; this step takes the maximum before it multiplies: a scale above 0")
