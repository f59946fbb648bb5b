"""Skip this file when you learn: it runs one step by itself, `python -m flashtile_ladder.step05_flash1`.

It prints a result, its largest error against attention in fp64, the bytes that the step moves, and its time against the
step before. A step that needs a GPU, a compiler or a package that is not here says so.
"""

import gc
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import STEPS, Step
from .counted import count

SMALL, LARGE = (64, 16), (512, 64)  # N, d: up to step 3, whose loops are Python's or C++'s, and from step 4 on
SECONDS = 0.3  # of timing
COUNTED = ("step01_softmax", "step04_standard", "step05_flash1", "step06_flash2", "step10_variants")
ROWS_OF_A_BLOCK = {  # of compiled code: rows for which K and V are read once
    "step07_numba": 32,
    "step07_numba_cuda": 32,
    "step08_triton_lite": 64,
    "step08_triton_online": 64,
    "step08_triton_lse": 64,
    "step09_cuda_warps": 1,
    "step09_cuda_registers": 64,
    "step09_cuda_tensor_cores": 64,
}
ON_GPU = ("step09_cuda_rows", *(name for name in ROWS_OF_A_BLOCK if name != "step07_numba"))


def run(file: str) -> None:
    """Print what the step in this file does. Exits with 1 where it cannot run here."""
    torch.set_num_threads(1)
    number = next(i for i, step in enumerate(STEPS) if step.module == Path(file).stem)
    step, module = STEPS[number], STEPS[number].load()
    n, d = SMALL if step.number < 4 else LARGE
    generator = torch.Generator().manual_seed(0)
    device = device_for(step)
    q, k, v = (torch.randn((n, d), generator=generator).to(device) for _ in range(3))
    print(f"Step {step.number}, {step.name}: {step.changed}")
    print(f"one head, N = {n}, d = {d}, on {'the GPU' if device.type == 'cuda' else 'the CPU'}")
    try:
        out = first(call(step, q, k, v)())
    except (RuntimeError, ValueError) as problem:
        print(f"cannot run: {problem}")
        raise SystemExit(1) from None
    print(f"{'out[0, :4]':28} {', '.join(f'{x:.6f}' for x in out[0, :4].tolist())}")
    print(f"{'largest error, from fp64':28} {float((out.cpu().double() - exact(q, k, v)).abs().max()):.1e}")
    print(f"{'bytes':28} {bytes_moved(step, module, q, k, v)}")
    own = milliseconds(call(step, q, k, v), device)
    interpreted = device.type == "cpu" and step.module in ON_GPU
    print(f"{'time':28} {own:.4g} ms{' of an interpreter, which says nothing of a GPU' if interpreted else ''}")
    for earlier in reversed(STEPS[:number]):
        try:
            before = milliseconds(call(earlier, q, k, v), device)
        except (RuntimeError, ValueError):  # it needs what is not here, or takes other sizes
            continue
        print(f"{'the step before':28} {before:.4g} ms: {earlier.number}, {earlier.name}")
        faster = f"{before / own:.3g} times as fast" if before > own else f"{own / before:.3g} times as slow"
        print(f"{'':28} this one is {faster}")
        return


def device_for(step: Step) -> torch.device:
    """The GPU for a step that needs one, where there is one; interpreters take the CPU's tensors."""
    return torch.device("cuda" if step.module in ON_GPU and torch.cuda.is_available() else "cpu")


def call(step: Step, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Any]:
    """`attention` of the step on these tensors, in the form and dtype that it takes."""
    module = step.load()
    if step.module == "step02_autograd":
        values = [module.values(x.tolist()) for x in (q, k, v)]
        return lambda: module.attention(*values)
    if not step.tensors:
        rows = [x.tolist() for x in (q, k, v)]
        return lambda: module.attention(*rows)
    if step.module == "step09_cuda_tensor_cores":
        q, k, v = (x.half() for x in (q, k, v))
    return lambda: module.attention(q, k, v)


def first(results: tuple[Any, ...]) -> Tensor:
    """`out` as a tensor `[N, d]`."""
    out = results[0]
    if isinstance(out, list):
        return torch.tensor([[getattr(x, "data", x) for x in row] for row in out], dtype=torch.float64)
    return out


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention `[N, d]` as defined, in fp64 on the CPU."""
    q, k, v = (x.cpu().double() for x in (q, k, v))
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v


def bytes_moved(step: Step, module: ModuleType, q: Tensor, k: Tensor, v: Tensor) -> str:
    """Reads and writes of HBM: counted where a step slices tensors, else from the bounds of its loops."""
    n, d = q.shape
    if step.module in COUNTED:
        function = module.attention_in_kernels if step.module == "step04_standard" else module.attention
        counts, _ = count(function, [q.cpu(), k.cpu(), v.cpu()])
        return megabytes(counts["read"], counts["written"]) + ", counted"
    if step.module == "step02_autograd":
        out, _ = module.attention(*(module.values(x.tolist()) for x in (q, k, v)))
        nodes = len(module.in_order([x for row in out for x in row]))
        return f"a graph of {nodes:,} nodes, counted; each is a Python object"
    if step.number < 4:  # the loops of step 2: each row of Q meets all rows of K and V
        itemsize = 8 if step.number == 2 else 4
        return megabytes(itemsize * (n * d + 2 * n * n * d), itemsize * n * (d + 1)) + ", from its loops"
    size = 2 if step.module == "step09_cuda_tensor_cores" else 4
    if step.module == "step09_cuda_rows":  # step 5's order: O, l and m come and go for each block of keys
        visits = math.ceil(n / module.BLOCK_N)
        read = size * (2 * n * d + visits * n * (2 * d + 2))
        return megabytes(read, size * (visits * n * (d + 2) + n)) + ", from its loops"
    visits = math.ceil(n / ROWS_OF_A_BLOCK[step.module])
    return megabytes(size * (n * d + visits * 2 * n * d), size * n * d + 4 * n) + ", from its loops"


def megabytes(read: int, written: int) -> str:
    return f"{read / 1e6:.3g} MB read, {written / 1e6:.3g} MB written"


def milliseconds(attend: Callable[[], Any], device: torch.device) -> float:
    """The fastest of some calls; the first one compiles."""
    attend()
    gc.disable()  # its search for cycles, which step 2's many objects set off, takes longer than the step
    try:
        best, end = math.inf, time.perf_counter() + SECONDS
        while math.isinf(best) or time.perf_counter() < end:
            synchronize(device)
            start = time.perf_counter()
            attend()
            synchronize(device)
            best = min(best, time.perf_counter() - start)
    finally:
        gc.enable()
    return 1e3 * best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def guarded(main: Callable[[], None]) -> None:
    """Run the program of a file that is no step; where it cannot run here, say so and exit with 1."""
    try:
        main()
    except RuntimeError as problem:
        raise SystemExit(f"cannot run: {problem}") from None
