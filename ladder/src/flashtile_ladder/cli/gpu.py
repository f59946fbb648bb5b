"""Tables of `flashtile-ladder` that need a GPU: steps 7 to 9 as kernels, and the cost of orders of memory accesses."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import step07_numba_cuda, step08_triton_lse, step09_hopper
from .._host import cuda_launch
from .._host.cuda_compile import CudaUnavailableError, Source
from .._host.cuda_steps import registers, rows, split_keys, stages, tensor_cores, tensor_cores_of, warps
from .._host.gluon_or_not import hopper_problem
from ..measure import memory_levels, memory_patterns
from ..related import block_query, shared_memory
from .library import STEP, attention
from .measure import Measurement, Run, Table, error_of, inputs, timed, triton_compiles

Prepare = Callable[[Tensor, Tensor, Tensor], Run]  # from q, k, v `[N, d]` in float32 to a call

STEP_9: dict[str, tuple[Any, torch.dtype]] = {
    "9 CUDA C++, rows": (rows, torch.float32),
    "9 CUDA C++, warps": (warps, torch.float32),
    "9 CUDA C++, registers": (registers, torch.float32),
    "9 CUDA C++, tensor cores, float16": (tensor_cores, torch.float16),
    "9 CUDA C++, two stages, float16": (stages, torch.float16),
}
NUMBA, TRITON, HOPPER = "7 Numba for CUDA", "8 Triton, lse", "9 Gluon, Hopper, float16"


def gpu_steps(device: torch.device) -> dict[str, Prepare]:
    """The steps that run as kernels here."""
    steps: dict[str, Prepare] = {}
    if numba_problem(device) is None:
        steps[NUMBA] = functools.partial(call_in, torch.float32, step07_numba_cuda)
    if triton_compiles(device):
        steps[TRITON] = functools.partial(call_in, torch.float32, step08_triton_lse)
    if cuda_problem(device) is None:
        steps |= {
            name: functools.partial(call_in, dtype, step)
            for name, (step, dtype) in STEP_9.items()
            if cuda_launch.unavailable(device, dtype) is None
        }
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
        warps.attention(q, q, q)
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


# Kernels side by side ---------------------------------------------------------------------------------------------

CUDA_LENGTHS = (1024, 4096)
CUDA_HEADS = 16


class Call(NamedTuple):
    """A kernel on q, k, v `[1, heads, N, 64]`, and its source for figures of the compiler."""

    attend: Callable[[Tensor, Tensor, Tensor], Any]  # to (out, ...)
    dtype: torch.dtype = torch.float32
    source: Source | None = None
    name: str = ""


def cuda_calls(device: torch.device) -> dict[str, Call]:
    """Step 9; the block for each query with either reduction; keys to the warps; and the product."""
    calls = {
        name: Call(step.attention, dtype, step.source_for(64, dtype), step.NAME)
        for name, (step, dtype) in STEP_9.items()
    }
    for reduction in ("tree", "shuffles"):
        attend = functools.partial(head_by_head, functools.partial(block_query.attention, reduction=reduction))
        for dtype in (torch.float32, torch.float16):
            source = block_query.source_for(64, reduction, dtype)
            title = f"block for each query, {reduction}{', float16' if dtype is torch.float16 else ''}"
            calls[title] = Call(attend, dtype, source, block_query.NAME)
    half = torch.float16
    if hopper_problem(device) is None:
        calls[HOPPER] = Call(step09_hopper.attention, half)
    calls["split-K, float16"] = Call(split_keys.attention, half, split_keys.source_for(64), split_keys.NAME)
    return calls | {f"{STEP}, {t}": Call(all_heads, getattr(torch, t)) for t in ("float32", "float16")}


def cuda(device: torch.device) -> Measurement:
    table = Table("cuda", f"Kernels in CUDA C++: {CUDA_HEADS} heads, d = 64; what a kernel takes, and its time")
    table.see = "Sharing rows in a warp, arrays of registers and tensor cores are worth several times each."
    yield "compiling"
    problem = cuda_problem(device)
    if problem is not None:
        table.notes.append(f"Not measured: {problem}")
        return table
    calls = {name: x for name, x in cuda_calls(device).items() if cuda_launch.unavailable(device, x.dtype) is None}
    if numba_problem(device) is None:
        calls = {NUMBA: Call(functools.partial(head_by_head, step07_numba_cuda.attention))} | calls
    for n in CUDA_LENGTHS:
        one = inputs(n, 64, device)
        for name, call in calls.items():
            yield f"{name}, N = {n}"
            q, k, v = (x.to(call.dtype).expand(1, CUDA_HEADS, n, 64).contiguous() for x in one)
            attend = functools.partial(call.attend, q, k, v)
            row = {"n": n, "step": name} | timed(attend, device)
            row["tflops"] = 4 * CUDA_HEADS * n * n * 64 / row["ms"] / 1e9
            last = (x[0, -1] for x in (q, k, v))
            row["error"] = error_of(attend()[0][0, -1], *last)
            table.rows.append(row | taken(name, call, device))
    table.notes.append(
        "TFLOP/s count the two products of every pair of a row and a key; registers and spilled bytes (local memory) "
        "are for a thread. Numba's kernel and the block for each query take one head: a launch for each."
    )
    return table


def taken(name: str, call: Call, device: torch.device) -> dict[str, Any]:
    """Registers and local memory of a thread, shared memory of a block; `None` for the product."""
    names = "registers", "spilled_bytes", "shared_bytes"
    if name == NUMBA:
        return dict(zip(names, numba_takes(step07_numba_cuda.kernel(64)), strict=True))
    kernel = None if call.source is None else compiled(call.source, call.name, device)
    found: dict[str, Any] = {x: kernel and getattr(kernel, x) for x in names}
    asked = {step.NAME: step.shared_bytes(64) for step in (tensor_cores, stages)}  # by the launch
    if kernel is not None:
        found["shared_bytes"] += asked.get(call.name, 0)
    return found


def numba_takes(kernel: Any) -> list[int]:
    """The same of a kernel of Numba's, which was compiled for one signature."""
    by_signature = kernel.get_regs_per_thread(), kernel.get_local_mem_per_thread(), kernel.get_shared_mem_per_block()
    return [next(iter(found.values())) for found in by_signature]


def head_by_head(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
    """A kernel for one head, launched for each."""
    return (torch.stack([attend(q[0, h], k[0, h], v[0, h])[0] for h in range(q.shape[1])])[None],)


# Shared memory --------------------------------------------------------------------------------------------------------

SHARED_LENGTH = 4096


def shared(device: torch.device) -> Measurement:
    """Tiles in dynamic shared memory, with one stage or two."""
    n = SHARED_LENGTH
    table = Table("shared", f"Tiles in shared memory: {CUDA_HEADS} heads, N = {n}, float16")
    table.see = "A second buffer hides the copies of K; a larger tile reads K and V less often and leaves fewer blocks."
    yield "compiling"
    if (problem := cuda_problem(device) or cuda_launch.unavailable(device, torch.float16)) is not None:
        table.notes.append(f"Not measured: {problem}")
        return table
    for tile in shared_memory.MEASURED:
        yield f"{tile}"
        one = inputs(n, tile.d, device)
        q, k, v = (x.half().expand(1, CUDA_HEADS, n, tile.d).contiguous() for x in one)
        step = tensor_cores_of(**tile.keywords)
        run = functools.partial(step.attention, q, k, v)
        row = {"head_dim": tile.d, "tile": f"{tile.rows} x {tile.keys}", "stages": tile.stages}
        row["shared_kb"] = tile.bytes / shared_memory.KB
        row["ms"] = memory_patterns.fastest_ms(run)
        row["tflops"] = 4 * CUDA_HEADS * n * n * tile.d / row["ms"] / 1e9
        row["error"] = error_of(run()[0][0, -1], *(x[0, -1] for x in (q, k, v)))
        kernel = compiled(step.source_for(tile.d), step.NAME, device)
        table.rows.append(row | {"registers": kernel.registers, "spilled_bytes": kernel.spilled_bytes})
    most = cuda_launch.most_shared_bytes(device)
    table.notes.append(
        f"A block has 48 KB without asking, and {most / shared_memory.KB:.0f} KB at most here. Times are the device's."
    )
    return table


def all_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any]:
    return (attention(q, k, v),)


def compiled(source: Source, name: str, device: torch.device) -> cuda_launch.Kernel:
    index = torch.cuda.current_device() if device.index is None else device.index
    return cuda_launch.kernel(source, name, index)


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
memory = measured(
    "memory",
    "Memory, level by level: the latency of one access, the rate of all multiprocessors, bytes under way to reach it",
    "Each level is several times faster than the next: a tile pays where it is used more often than it is fetched.",
    memory_levels.levels,
    "Registers: multiply-adds that wait for one another, and 16 bytes for each that does not. L2 and HBM: past L1.",
)
banks = measured(
    "banks",
    "Banks of shared memory: rows with padding and without",
    "A column in one bank takes 32 turns; one unused number for each row spreads it over 32 banks.",
    memory_patterns.bank_conflicts,
    "Columns of a tile of 32 x 32, and the kernels of step 9 with 16 heads, N = 2048, d = 64.",
)
