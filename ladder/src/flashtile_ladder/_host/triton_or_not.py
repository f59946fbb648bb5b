"""Skip this file when you learn: checks before step 8's launches, and Triton in a form that can be imported without it.

Without Triton, `triton` and `tl` are stand-ins that let the kernels be defined and read. `check` runs before each
launch and says what is missing, so that a missing GPU is not an error from inside Triton.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

triton: Any
tl: Any
try:
    triton, tl = import_module("triton"), import_module("triton.language")
except ImportError:
    triton, tl = SimpleNamespace(jit=lambda function: function), SimpleNamespace(constexpr=int)

INSTALLED = hasattr(triton, "__version__")
HEAD_DIMS = (16, 32, 64, 128)  # tl.dot takes no less than 16; two stages of 128 in float32 take 112 KB of shared memory

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PRECISIONS = ("ieee", "tf32")  # of products of float32


class TritonUnavailableError(RuntimeError):
    """Step 8 cannot run here; the message says what is missing."""


def interprets(function: Any) -> bool:
    """Whether a jit function is run by Triton's interpreter; that is settled when it is defined."""
    return not isinstance(function, triton.runtime.JITFunction)


def unavailable(kernel: Any, device: torch.device) -> str | None:
    """Why the kernel does not run on tensors of the device; `None` if it does."""
    if not INSTALLED:
        return "Triton is not installed: `pip install triton` (Linux; PyTorch's CUDA builds bring it along)"
    if interprets(kernel) != interprets(tl.cdiv):
        return "TRITON_INTERPRET has changed since Triton was imported: set it before Python starts"
    if device.type == "cuda" or (device.type == "cpu" and interprets(kernel)):
        return None
    return (
        f"the tensors are on {device}, and Triton compiles for GPUs alone. Move them to one, or set TRITON_INTERPRET=1 "
        "before Python starts: then Triton's interpreter runs the kernel on CPU tensors"
    )


def check(
    kernel: Any, q: Tensor, k: Tensor, v: Tensor, multiple_of: int = 1, precision: str = "ieee", heads: bool = False
) -> None:
    """Refuse a launch that would fail; with `heads`, `[B, heads, N, d]` goes too.

    Raises:
        TritonUnavailableError: no kernel runs on the tensors' device.
        ValueError: shapes, dtypes or a precision that this step does not take.
    """
    reason = unavailable(kernel, q.device)
    if reason is not None:
        raise TritonUnavailableError(f"step 8 of the ladder is Triton, which cannot run this call: {reason}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    ndims, forms = ((2, 4), "[N, d] or [B, heads, N, d]") if heads else ((2,), "[N, d]")
    n, d = q.shape[-2:]
    if q.ndim not in ndims or len(set(shapes)) != 1 or d not in HEAD_DIMS or q.numel() == 0 or n % multiple_of:
        lengths = f"N a multiple of {multiple_of}" if multiple_of > 1 else "N at least 1"
        raise ValueError(f"q, k, v are {shapes}; this step takes {forms} for all three, d in {HEAD_DIMS}, {lengths}")
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) != 1 or q.dtype not in DTYPES:
        raise ValueError(f"q, k, v are {dtypes}; this step takes float32, float16 or bfloat16")
    if q.dtype is torch.bfloat16 and interprets(kernel):
        raise ValueError("q, k, v are bfloat16, whose bits Triton's interpreter multiplies as integers (Triton 3.9)")
    if precision not in PRECISIONS:
        raise ValueError(f"input_precision={precision!r}; this step takes one of {PRECISIONS}")


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def whole_tiles(
    kernel: Any, block: int, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, *,
    input_precision: str = "ieee",
) -> tuple[Tensor, None]:  # fmt: skip
    """`[N, d]` to out `[N, d]` by a kernel that has no masks, in tiles of `block` rows and keys; no lse.

    `input_precision` is that of `tl.dot` for float32: "ieee", or Triton's default "tf32" (see step08_triton_lse).

    Raises:
        TritonUnavailableError: Triton is missing, or there is neither a GPU nor its interpreter.
        ValueError: causal, or a shape or dtype outside the step's limits.
    """
    if causal:
        raise ValueError("this step has no causal; step08_triton_lse has")
    check(kernel, q, k, v, multiple_of=block, precision=input_precision)
    n, d = q.shape
    scale = 1 / math.sqrt(d) if scale is None else scale
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    with on(q.device):
        kernel[(n // block,)](q, k, v, out, n, scale, d, block, block, input_precision, num_stages=2)
    return out, None
