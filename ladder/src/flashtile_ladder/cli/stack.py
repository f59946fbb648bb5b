"""The table `stack` of `flashtile-ladder`: every step at d = 16, from Python's objects to the product.

Published figures, here and in the other tables, are those of a course project on FlashAttention (its tables 4.1 to
4.4), from machines that are not this one: they are there to compare orders of magnitude.
"""

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import (
    step02_autograd,
    step02_floats,
    step04_standard,
    step05_flash1,
    step06_flash2,
    step07_numba,
    step08_triton_lite,
    step10_variants,
)
from .._host import cpp as step03_cpp
from ..related import triton_any_size
from .gpu import gpu_steps, missing_gpu_steps
from .library import STEP, one_head, plan
from .measure import Measurement, Run, Table, error_of, first, inputs, timed, triton_compiles

STACK_LENGTHS = (8, 16, 32, 64)
LITE, LITE_ANY = "8 Triton, lite", "8 Triton, lite, any size"  # the first takes whole tiles; one tile is right
STACK_PUBLISHED: dict[str, dict[int, float]] = {  # timed
    "2 scalar autograd": {8: 0.209, 16: 0.446, 32: 0.886, 64: 1.551},
    "2 Python floats": {8: 0.018, 16: 0.032, 32: 0.061, 64: 0.100},
    "3 C++ -O2": {8: 0.001, 16: 0.005, 32: 0.017, 64: 0.063},
    "4 standard PyTorch": {8: 0.054, 16: 0.049, 32: 0.054, 64: 0.056},  # on a GPU
    LITE_ANY: {8: 0.025, 16: 0.034, 32: 0.020, 64: 0.036},
}


def stack(device: torch.device, lengths: tuple[int, ...] | None = None, seconds: float = 0.2) -> Measurement:
    """Every step at each of the lengths, for this many seconds each."""
    lengths = lengths or STACK_LENGTHS
    table = Table("stack", "The whole stack: forward of one head, d = 16, milliseconds (in brackets: published)")
    table.see = "Compiling is worth far more than all that follows at this size; the graph of a number costs most."
    for name, prepare in stack_steps(device).items():
        for n in lengths:
            whole = n % step08_triton_lite.BLOCK_M == 0
            if (name == LITE and not whole) or (name == LITE_ANY and n > triton_any_size.BLOCK_N):
                continue
            yield f"{name}, N = {n}"
            q, k, v = inputs(n, 16, device)
            run = prepare(q, k, v)
            published = {"published_ms": STACK_PUBLISHED.get(name, {}).get(n)}
            table.add(
                {"step": name, "n": n},
                lambda run=run, qkv=(q, k, v), published=published: (
                    timed(run, device, seconds) | {"error": error_of(first(run()), *qkv)} | published
                ),
            )
    table.notes += missing_steps(device)
    table.asides.append(
        "The published times of step 2 grow as N, not as N²: as one query row over N keys would. Here all N rows are "
        "computed."
    )
    q, k, v = (x[None, None] for x in inputs(lengths[-1], 16, device))
    if (words := plan(q, k, v)) is not None:
        table.asides.append(f"Step 11 at N = {lengths[-1]}: {words}")
    return table


Prepare = Callable[[Tensor, Tensor, Tensor], Run]  # from q, k, v `[N, d]`


def stack_steps(device: torch.device) -> dict[str, Prepare]:
    """The steps that run here. Python, C++ and Numba run on the CPU, whatever the device."""
    steps: dict[str, Prepare] = {"2 scalar autograd": on_values, "2 Python floats": on_floats}
    if cpp_problem() is None:
        steps["3 C++ Value*, -O2"] = on_cpu(step03_cpp.attention, flags=step03_cpp.O2, graph=True)
        steps["3 C++ -O2"] = on_cpu(step03_cpp.attention, flags=step03_cpp.O2)
        steps["3 C++ -O3 native"] = on_cpu(step03_cpp.attention, flags=step03_cpp.O3)
    steps["4 standard PyTorch"] = on_tensors(step04_standard.attention)
    steps["5 FlashAttention-1"] = on_tensors(step05_flash1.attention)
    steps["6 FlashAttention-2"] = on_tensors(step06_flash2.attention)
    if importlib.util.find_spec("numba") is not None:
        steps["7 Numba"] = on_cpu(step07_numba.attention)
    if triton_compiles(device):
        steps[LITE] = on_tensors(step08_triton_lite.attention)
        steps[LITE_ANY] = on_tensors(functools.partial(triton_any_size.attention, softmax="lite"))
    steps |= gpu_steps(device)
    steps["10 compiled variants"] = on_tensors(step10_variants.attention)
    steps[STEP] = on_tensors(one_head)
    return steps


def on_values(q: Tensor, k: Tensor, v: Tensor) -> Run:
    a, b, c = (step02_autograd.values(x.tolist()) for x in (q, k, v))
    return lambda: step02_autograd.attention(a, b, c)


def on_floats(q: Tensor, k: Tensor, v: Tensor) -> Run:
    a, b, c = (x.tolist() for x in (q, k, v))
    return lambda: step02_floats.attention(a, b, c)


def on_cpu(function: Callable[..., Any], **keywords: Any) -> Prepare:
    def prepare(q: Tensor, k: Tensor, v: Tensor) -> Run:
        a, b, c = (x.cpu() for x in (q, k, v))
        return lambda: function(a, b, c, **keywords)

    return prepare


def on_tensors(function: Callable[..., Any]) -> Prepare:
    return lambda q, k, v: lambda: function(q, k, v)


def cpp_problem() -> str | None:
    """Why step 3 cannot be compiled here; `None` if it is."""
    try:
        for flags in (step03_cpp.O2, step03_cpp.O3):
            step03_cpp.library(flags)
    except step03_cpp.CompilerError as error:
        return str(error)
    return None


def missing_steps(device: torch.device) -> list[str]:
    notes = []
    if (problem := cpp_problem()) is not None:
        notes.append(f"Step 3 is missing: {problem}")
    if importlib.util.find_spec("numba") is None:
        notes.append("Step 7 is missing: Numba is not installed (pip install 'flashtile-ladder[numba]').")
    if device.type == "cuda":
        notes += missing_gpu_steps(device)
    if triton_compiles(device):
        notes.append("Step 8's lite takes N in multiples of 64; that of any size takes any. Both are wrong beyond 64.")
    else:
        notes.append("Step 8 is missing: without a GPU its times would be those of an interpreter.")
    if device.type != "cuda":
        notes.append("Step 9 is missing: it needs a GPU.")
    return notes
