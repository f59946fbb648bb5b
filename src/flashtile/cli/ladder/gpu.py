"""Tables of `flashtile ladder` that need a GPU: steps 7 to 9 as kernels, and the cost of orders of memory accesses."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ... import attention
from ...ladder import (
    cuda_launch,
    memory_patterns,
    step07_numba_cuda,
    step08_triton_lse,
    step09_cuda_registers,
    step09_cuda_rows,
    step09_cuda_tensor_cores,
    step09_cuda_warps,
)
from ...ladder.cuda_compile import CudaUnavailableError
from .measure import Measurement, Run, Table, error_of, inputs, timed, triton_compiles

Prepare = Callable[[Tensor, Tensor, Tensor], Run]  # from q, k, v `[N, d]` in float32 to a call

STEP_9: dict[str, tuple[Any, torch.dtype]] = {
    "9 CUDA C++, rows": (step09_cuda_rows, torch.float32),
    "9 CUDA C++, warps": (step09_cuda_warps, torch.float32),
    "9 CUDA C++, registers": (step09_cuda_registers, torch.float32),
    "9 CUDA C++, tensor cores, float16": (step09_cuda_tensor_cores, torch.float16),
}
NUMBA, TRITON = "7 Numba for CUDA", "8 Triton, lse"


def gpu_steps(device: torch.device) -> dict[str, Prepare]:
    """The steps that run as kernels here."""
    steps: dict[str, Prepare] = {}
    if numba_problem(device) is None:
        steps[NUMBA] = functools.partial(call_in, torch.float32, step07_numba_cuda)
    if triton_compiles(device):
        steps[TRITON] = functools.partial(call_in, torch.float32, step08_triton_lse)
    if cuda_problem(device) is None:
        steps |= {name: functools.partial(call_in, dtype, step) for name, (step, dtype) in STEP_9.items()}
    return steps


def call_in(dtype: torch.dtype, step: Any, q: Tensor, k: Tensor, v: Tensor) -> Run:
    return functools.partial(step.attention, q.to(dtype), k.to(dtype), v.to(dtype))


def missing_gpu_steps(device: torch.device) -> list[str]:
    """Why some do not run, on a GPU."""
    problems = {"7 for CUDA": numba_problem(device), "9": cuda_problem(device)}
    return [f"Step {number} is missing: {problem}" for number, problem in problems.items() if problem is not None]


@functools.cache
def cuda_problem(device: torch.device) -> str | None:
    """Why step 9 does not run on the device; `None` if it does."""
    reason = cuda_launch.unavailable(device)
    if reason is not None:
        return reason
    try:
        q = torch.zeros((1, 16), device=device)
        step09_cuda_warps.attention(q, q, q)
    except CudaUnavailableError as error:
        return str(error)
    return None


@functools.cache
def numba_problem(device: torch.device) -> str | None:
    """The same for step 7. Numba looks for parts of a CUDA toolkit, with errors of its own where they are not there."""
    if device.type != "cuda":
        return "it runs on a GPU"
    try:
        q = torch.zeros((1, 16), device=device)
        step07_numba_cuda.attention(q, q, q)
    except Exception as error:
        words = str(error).strip()
        return f"{type(error).__name__}: {words.splitlines()[0]}" if words else type(error).__name__
    return None


# Step 9 side by side --------------------------------------------------------------------------------------------------

CUDA_LENGTHS = (1024, 4096)
CUDA_HEADS = 16


def cuda(device: torch.device) -> Measurement:
    table = Table("cuda", f"Step 9: {CUDA_HEADS} heads, d = 64; what a kernel takes, and its time")
    table.see = "Sharing rows in a warp, arrays of registers and tensor cores are worth several times each."
    yield "compiling"
    problem = cuda_problem(device)
    if problem is not None:
        table.notes.append(f"Not measured: {problem}")
        return table
    steps = STEP_9 | {f"11 flashtile.attention, {t}": (None, getattr(torch, t)) for t in ("float32", "float16")}
    for n in CUDA_LENGTHS:
        one = inputs(n, 64, device)
        for name, (step, dtype) in steps.items():
            yield f"{name}, N = {n}"
            q, k, v = (x.to(dtype).expand(1, CUDA_HEADS, n, 64).contiguous() for x in one)
            attend = functools.partial(step.attention if step else all_heads, q, k, v)
            row = {"n": n, "step": name} | timed(attend, device)
            row["tflops"] = 4 * CUDA_HEADS * n * n * 64 / row["ms"] / 1e9
            last = (x[0, -1] for x in (q, k, v))
            row["error"] = error_of(attend()[0][0, -1], *last)
            kernel = None if step is None else compiled(step, dtype, device)
            row["registers"] = kernel and kernel.registers
            row["spilled_bytes"] = kernel and kernel.spilled_bytes
            row["shared_bytes"] = kernel and kernel.shared_bytes
            table.rows.append(row)
    table.notes.append(
        "TFLOP/s count the two products of every pair of a row and a key; registers and spilled bytes are for a thread."
    )
    return table


def all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any]:
    return (attention(q, k, v),)


def compiled(step: Any, dtype: torch.dtype, device: torch.device) -> cuda_launch.Kernel:
    index = torch.cuda.current_device() if device.index is None else device.index
    return cuda_launch.kernel(step.source_for(64, dtype), step.NAME, index)


# Memory ---------------------------------------------------------------------------------------------------------------


def measured(
    name: str, title: str, see: str, measure: Callable[[torch.device], Iterator[dict[str, Any]]], note: str
) -> Any:
    """A table of the rows that `measure` yields."""

    def run(device: torch.device) -> Measurement:
        table = Table(name, title, see=see)
        yield "compiling"
        problem = cuda_problem(device)
        if problem is not None:
            table.notes.append(f"Not measured: {problem}")
            return table
        for row in measure(device):
            yield str(next(iter(row.values())))
            table.rows.append(row)
        table.notes.append(note)
        return table

    return run


coalescing = measured(
    "coalescing",
    "Loads: every number once, neighbouring threads reading numbers that lie a stride apart",
    "A load of 32 lanes costs what it fetches, and not what it uses.",
    memory_patterns.coalescing,
    f"{memory_patterns.NUMBERS * 4 / 2**20:.0f} MiB of float32; used are 4 bytes of each number.",
)
banks = measured(
    "banks",
    "Banks of shared memory: rows with padding and without",
    "A column in one bank takes 32 turns; one unused number for each row spreads it over 32 banks.",
    memory_patterns.bank_conflicts,
    "Columns of a tile of 32 x 32, and the kernels of step 9 with 16 heads, N = 2048, d = 64.",
)
