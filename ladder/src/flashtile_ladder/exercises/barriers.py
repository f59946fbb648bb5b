"""A barrier is taken out of step 9's kernels: for which N is the result still right? The emulation knows."""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from .._host.cuda_steps import STEPS, CudaStep
from .._host.emulation import ORDERS, EmulationError, emulation
from ..step04_standard import attention

SIZES = (16, 32, 33, 65)  # N
NEAR = 5e-3  # in 16 bits
CASES = {
    "rows, the tile is there": ("step09_cuda_rows", "__syncthreads();  // the tile is there"),
    "rows, the tile is read": ("step09_cuda_rows", "__syncthreads();  // no thread reads the tile any more"),
    "tensor cores, K is read": (
        "step09_cuda_tensor_cores",
        "__syncthreads();  // no thread reads K any more: V takes its place",
    ),
    "tensor cores, V is read": (
        "step09_cuda_tensor_cores",
        "__syncthreads();  // no thread reads the last V any more",
    ),
}


def predicted() -> dict[str, set[int]]:
    """Of N = 16, 32, 33 and 65, those for which the kernel is right without the barrier."""
    right = {name: set() for name in CASES}
    right["rows, the tile is there"] = set()
    right["rows, the tile is read"] = {16, 32}
    right["tensor cores, V is read"] = {16, 32, 33}
    right["tensor cores, K is read"] = {16}
    return right


@functools.cache
def holds(barrier: str, n: int) -> bool:
    """Whether all orders of the threads give the right result at N, d = 16."""
    module, text = CASES[barrier]
    step = replace(STEPS[module], replaced=(text, ""))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 16, generator=generator).to(step.dtypes[0]) for _ in range(3))
    expected = attention(q.double(), k.double(), v.double())[0]
    return all(float((emulated(step, order, q, k, v) - expected).abs().max()) < NEAR for order in ORDERS)


def sentence(barrier: str, n: int, right: bool) -> str:
    return f"At N = {n}, without the barrier of {barrier!r}, the result is {'right' if right else 'wrong'}"


def emulated(step: CudaStep, order: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """out `[N, d]`; NaN where the emulation stops with an error."""
    try:
        with emulation(order):
            return step.attention(q, k, v)[0].double()
    except EmulationError:
        return torch.full_like(q, torch.nan)
