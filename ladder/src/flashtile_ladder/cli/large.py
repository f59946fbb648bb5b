"""The table `large` of `flashtile-ladder`: tensor-core steps on a call that fills a large GPU, forward and backward."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import step08_triton_backward, step08_triton_lse, step09_hopper
from .._host import cuda_launch
from .._host.cuda_steps import stages, tensor_cores
from .._host.gluon_or_not import hopper_problem
from .clock import Clock
from .dtypes import BACKWARD, device_seconds, rates
from .gpu import HOPPER, TRITON, cuda_problem
from .library import STEP, attention
from .measure import Measurement, Run, Table, triton_compiles

LENGTH, HEADS, WIDTH = 16384, 16, 128


def large(device: torch.device) -> Measurement:
    """Steps with tensor cores, forward and backward, and the last step."""
    table = Table("large", f"Tensor cores, float16: {HEADS} heads, N = {LENGTH}, d = {WIDTH}, time of the device alone")
    table.see = "From mma.sync to Hopper's instructions is the largest jump of all, and the one without a formula."
    yield "compiling"
    if (problem := cuda_problem(device) or cuda_launch.unavailable(device, torch.float16)) is not None:
        table.notes.append(f"Not measured: {problem}")
        return table
    clock, peak = Clock(device), rates(device)["float16"].flops_per_second
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, HEADS, LENGTH, WIDTH)
    q, k, v, dout = (torch.randn(shape, generator=generator, device=device).half() for _ in range(4))
    for causal, (direction, kernels) in itertools.product(
        (False, True), (("forward", forward(device, q, k, v)), ("backward", backward(device, q, k, v, dout)))
    ):
        for step, kernel in kernels.items():
            yield f"{step}, {direction}"
            seconds = min(device_seconds(kernel(causal), clock))
            flops = (4 if direction == "forward" else 10) * HEADS * LENGTH**2 * WIDTH / (2 if causal else 1)
            row = {"pass": direction, "mask": "causal" if causal else "full", "step": step, "ms": seconds * 1e3}
            row |= {"tflops": flops / seconds / 1e12, "peak_percent": 100 * flops / seconds / peak}
            table.rows.append(row)
    table.notes.append("TFLOP/s count the products of visible pairs: two forward, five backward.")
    return table


def forward(device: torch.device, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[bool], Run]]:
    """By step, from `causal` to the call."""
    steps: dict[str, Any] = {}
    if triton_compiles(device):
        steps[TRITON] = functools.partial(step08_triton_lse.attention, block_m=128, block_n=64)
    steps["9 CUDA C++, tensor cores"] = tensor_cores.attention
    steps["9 CUDA C++, two stages"] = stages.attention
    if hopper_problem(device) is None:
        steps[HOPPER.removesuffix(", float16")] = step09_hopper.attention
    steps[STEP] = attention
    return {name: functools.partial(functools.partial, step, q, k, v) for name, step in steps.items()}


def backward(device: torch.device, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Callable[[bool], Run]]:
    """`backward` alone: out and lse are there."""

    def library(causal: bool) -> Run:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention(leaves[0], leaves[1], leaves[2], causal)
        return functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)

    def triton(causal: bool) -> Run:
        out, lse = step08_triton_lse.attention(q, k, v, causal)
        return functools.partial(step08_triton_backward.backward, q, k, v, out, lse, dout, causal)

    steps: dict[str, Callable[[bool], Run]] = {BACKWARD: triton} if triton_compiles(device) else {}
    return steps | {STEP: library}
