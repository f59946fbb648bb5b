"""The tables `dtypes` and `blocks` of `flashtile-ladder`: kernels in every dtype that they take, by the GPU's own time.

A comparison is fair where inputs, dtype, precision of products and mask are the same, and the device alone is timed.
"""

import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import (
    iomodel,
    step04_standard,
    step07_numba_cuda,
    step08_triton_backward,
    step08_triton_lse,
    step09_hopper,
    step10_variants,
)
from .._host.gluon_or_not import hopper_problem
from ..iomodel import Machine, Shape, roofline
from .clock import Clock
from .gpu import HOPPER, NUMBA, STEP_9, cuda_problem, numba_problem
from .library import STEP, attention
from .measure import Measurement, Run, Table, in_tf32, tf32_products, triton_compiles
from .rates import arithmetic, memory

LENGTHS, HEADS, WIDTH = (512, 2048, 8192), (1, 16), 64
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "TF32": torch.float32,
    "float32": torch.float32,
}
SECONDS, BLOCKS_SECONDS = 330.0, 120.0  # for each table: calls beyond are left out
SAMPLE_SECONDS, SAMPLES = 0.005, 5
VARIANTS, BACKWARD = "10 compiled variants", "8 Triton, backward"
MOST = {VARIANTS: 2048, NUMBA: 2048}  # loops of torch operations and of single threads take long beyond


class DataSheet(NamedTuple):
    """Peak rates of dense products, by dtype, and of memory."""

    flops_per_second: dict[str, float]
    bytes_per_second: float

    def ridge(self, dtype: str = "bfloat16") -> float:
        return self.flops_per_second[dtype] / self.bytes_per_second


DATA_SHEETS = {  # NVIDIA's data sheet for H200 SXM; rates with sparsity halved
    "NVIDIA H200": DataSheet({"float32": 67e12, "TF32": 494.5e12, "float16": 989.5e12, "bfloat16": 989.5e12}, 4.8e12),
}


class Problem(NamedTuple):
    """One call, but for the kernel that computes it."""

    label: str  # a key of DTYPES
    heads: int
    n: int
    causal: bool

    @property
    def shape(self) -> Shape:
        size = DTYPES[self.label].itemsize
        heads = self.heads
        return Shape(
            self.n, self.n, WIDTH, WIDTH, num_heads_q=heads, num_heads_kv=heads, causal=self.causal, itemsize=size
        )

    @property
    def precision(self) -> str:
        """The `input_precision` of Triton's products."""
        return "tf32" if self.label == "TF32" else "ieee"

    @property
    def key(self) -> dict[str, Any]:
        return {"dtype": self.label, "heads": self.heads, "mask": "causal" if self.causal else "full"}


def dtypes(device: torch.device) -> Measurement:
    """Forward of all, backward of those that have one."""
    table = Table("dtypes", f"All kernels in all dtypes: d = {WIDTH}, time of the device alone")
    table.see = (
        "Compare within a dtype: tensor cores, not fusion, separate float32 from the others, and fusion is worth most "
        "where the scores no longer fit the L2 cache."
    )
    if (problem_here := cuda_problem(device)) is not None:
        table.notes.append(f"Not measured: {problem_here}")
        return table
    yield "rates"
    clock, peaks, end = Clock(device), rates(device), time.perf_counter() + SECONDS
    for label, n, heads, causal in itertools.product(DTYPES, LENGTHS, HEADS, (False, True)):
        problem = Problem(label, heads, n, causal)
        if time.perf_counter() > end:
            table.notes.append(f"Left out after {SECONDS:.0f} s: {label}, N = {n}, {heads} heads, causal {causal}.")
            continue
        yield f"{label}, {heads} heads, N = {n}"
        tensors = random_tensors(problem, device)
        exact = exact_results(problem, tensors)
        for direction, step, run in runs(problem, tensors, device):
            try:
                row = measured(problem, direction, step, run, clock, peaks[label])
                found = run()
                row["error"] = error(found[:1] if direction == "forward" else found, exact[direction])
            except Exception as failure:
                table.notes.append(f"{step}, {label}, {direction}, N = {n}: {type(failure).__name__}: {failure}"[:200])
                continue
            table.rows.append(problem.key | {"pass": direction, "step": step, "n": n} | row)
    table.notes.append(
        "TFLOP/s count visible pairs, two products forward and five backward. Peak: the data sheet's for the dtype "
        "(elsewhere that of a matrix product measured here). Roofline: the time that an algorithm's own operations and "
        "bytes take at these rates; S and P count for step 4 where one of them does not fit the L2 cache. Step 10 is a "
        "loop of torch operations: the host's time, not the device's."
    )
    return table


def rates(device: torch.device) -> dict[str, Machine]:
    """Peak rates for each dtype: the data sheet's where there is one."""
    sheet = DATA_SHEETS.get(torch.cuda.get_device_name(device))
    if sheet is not None:
        return {label: Machine(peak, sheet.bytes_per_second) for label, peak in sheet.flops_per_second.items()}
    found = {label: arithmetic(device, dtype) for label, dtype in DTYPES.items() if label != "TF32"}
    with tf32_products():
        found["TF32"] = arithmetic(device, torch.float32)
    return {label: Machine(peak, memory(device)) for label, peak in found.items()}


def random_tensors(problem: Problem, device: torch.device) -> list[Tensor]:
    """q, k, v and dout `[1, heads, N, d]`."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, problem.heads, problem.n, WIDTH)
    return [torch.randn(shape, generator=generator, device=device).to(DTYPES[problem.label]) for _ in range(4)]


# Calls ----------------------------------------------------------------------------------------------------------------


def runs(problem: Problem, tensors: list[Tensor], device: torch.device) -> Iterator[tuple[str, str, Run]]:
    """Direction, step and call of all that compute the problem."""
    *qkv, dout = tensors
    leaves = [x.clone().requires_grad_() for x in qkv]
    within = in_tf32 if problem.label == "TF32" else lambda run: run
    differentiable = differentiable_calls(problem, device)
    for step, call in (differentiable | kernels(problem, device)).items():
        if problem.n > MOST.get(step, problem.n):
            continue
        yield "forward", step, within(functools.partial(tupled, call, qkv))
    for step, call in differentiable.items():
        out = within(functools.partial(call, *leaves))()
        gradients = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        yield "backward", step, within(gradients)
    if triton_compiles(device):
        yield "backward", BACKWARD, triton_backward(problem, tensors)
    if problem.heads == 1 and problem.n <= MOST[VARIANTS]:
        q, k, v, d = (x[0, 0] for x in tensors)
        out, lse = step10_variants.attention(q, k, v, problem.causal)
        run = functools.partial(step10_variants.backward, q, k, v, out, lse, d, problem.causal)
        yield "backward", VARIANTS, within(run)


def triton_backward(problem: Problem, tensors: list[Tensor]) -> Run:
    """Step 8's kernels for dq, dk, dv; out and lse are there."""
    q, k, v, dout = tensors
    out, lse = step08_triton_lse.attention(q, k, v, problem.causal, input_precision=problem.precision)
    call = functools.partial(step08_triton_backward.backward, input_precision=problem.precision)
    return functools.partial(call, q, k, v, out, lse, dout, problem.causal)


def tupled(call: Any, qkv: list[Tensor]) -> tuple[Tensor, ...]:
    found = call(*qkv)
    return found if isinstance(found, tuple) else (found,)


def differentiable_calls(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Those that autograd differentiates."""
    hidden = None
    if problem.causal:
        hidden = torch.ones((problem.n, problem.n), dtype=torch.bool, device=device).triu_(1)
    return {
        "4 standard PyTorch": functools.partial(standard, hidden=hidden),
        "SDPA": functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=problem.causal),
        STEP: functools.partial(attention, causal=problem.causal),
    }


def standard(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Step 4's three kernels, without lse; the mask of causal is there already."""
    s = step04_standard.scaled(q, None) @ k.mT
    if hidden is not None:
        s.masked_fill_(hidden, -torch.inf)
    return torch.softmax(s, dim=-1) @ v


def kernels(problem: Problem, device: torch.device) -> dict[str, Any]:
    """Those of the ladder that have a forward pass alone."""
    causal, found = problem.causal, {}
    if triton_compiles(device):
        found["8 Triton, lse"] = functools.partial(
            step08_triton_lse.attention, causal=causal, input_precision=problem.precision
        )
    if problem.label == "float32" and problem.heads == 1 and numba_problem(device) is None:
        found[NUMBA] = lambda q, k, v: step07_numba_cuda.attention(q[0, 0], k[0, 0], v[0, 0], causal)
    if problem.label != "TF32":
        for name, (step, dtype) in STEP_9.items():
            half = dtype is torch.float16 and DTYPES[problem.label].itemsize == 2  # float16 and bfloat16
            if half or DTYPES[problem.label] is dtype:
                found[name.removesuffix(", float16")] = functools.partial(step.attention, causal=causal)
        if DTYPES[problem.label].itemsize == 2 and hopper_problem(device) is None:
            found[HOPPER.removesuffix(", float16")] = functools.partial(step09_hopper.attention, causal=causal)
    if problem.heads == 1:
        found[VARIANTS] = lambda q, k, v: step10_variants.attention(q[0, 0], k[0, 0], v[0, 0], causal)
    return found


# Figures --------------------------------------------------------------------------------------------------------------


def measured(problem: Problem, direction: str, step: str, run: Run, clock: Clock, peak: Machine) -> dict[str, Any]:
    seconds = device_seconds(run, clock)
    shape = problem.shape
    useful = (4 if direction == "forward" else 10) * shape.pairs * WIDTH
    bound = roofline(*own_work(step, direction, shape, clock.cache_bytes), peak)
    return {
        "ms": min(seconds) * 1e3,
        "median_ms": sorted(seconds)[len(seconds) // 2] * 1e3,
        "tflops": useful / min(seconds) / 1e12,
        "peak_percent": 100 * useful / min(seconds) / peak.flops_per_second,
        "roofline_percent": 100 * bound.seconds / min(seconds),
        "limit": bound.limit,
    }


def device_seconds(run: Run, clock: Clock) -> list[float]:
    """Times of one call, in several samples of calls back to back, after two that compile and warm up."""
    run()
    run()
    once = clock.seconds(run, 1)
    calls = max(1, min(20, int(SAMPLE_SECONDS / max(once, 1e-6))))
    return [clock.seconds(run, calls) for _ in range(SAMPLES if once < 0.05 else 2)]


def own_work(step: str, direction: str, shape: Shape, cache: int) -> tuple[float, float]:
    """Operations and bytes of HBM, of the algorithm that a step is: standard, or each matrix once."""
    forward = direction == "forward"
    least = iomodel.flash2_forward(shape, shape.seqlen_q, shape.seqlen_k).moved
    if not forward:
        least += shape.attentions * 4 * shape.seqlen_q * WIDTH * shape.itemsize  # dout; dq, dk, dv
    if not step.startswith("4"):
        return (4 if forward else 10) * shape.pairs * WIDTH, least
    work = iomodel.standard_forward(shape) if forward else iomodel.standard_backward(shape)
    scores = shape.attentions * shape.seqlen_q * shape.seqlen_k * shape.itemsize
    return work.flops, work.moved if scores > cache else least


def exact_results(problem: Problem, tensors: list[Tensor]) -> dict[str, list[Tensor]]:
    """out, and dq, dk, dv, of the first head in fp64."""
    q, k, v, dout = (x[0, 0].double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    hidden = differentiable_calls(problem, q.device)["4 standard PyTorch"].keywords["hidden"]
    out = standard(*leaves, hidden=hidden)
    return {"forward": [out.detach()], "backward": list(torch.autograd.grad(out, leaves, dout))}


def error(found: tuple[Tensor, ...], exact: list[Tensor]) -> float:
    """The largest of an element of the first head."""
    pairs = zip((x.reshape(-1, *x.shape[-2:])[0] for x in found), exact, strict=True)
    return max(float((x.double() - y).abs().max()) for x, y in pairs)


# Triton's tiles -------------------------------------------------------------------------------------------------------

TILES = tuple(itertools.product((64, 128), (64, 128)))  # rows, keys: the four of FlashAttention-2
BLOCKS_LENGTH, BLOCKS_HEADS = 4096, 16


def blocks(device: torch.device) -> Measurement:
    """Step 8 in the four tiles that FlashAttention-2 chooses from."""
    table = Table(
        "blocks", f"Step 8 by tile: {BLOCKS_HEADS} heads, N = {BLOCKS_LENGTH}, d = {WIDTH}, time of the device"
    )
    table.see = "More rows halve the reads of K and V; more keys take registers: which is faster depends on the dtype."
    if not triton_compiles(device):
        table.notes.append("Not measured: it needs a GPU that Triton compiles for.")
        return table
    clock, peaks, end = Clock(device), rates(device), time.perf_counter() + BLOCKS_SECONDS
    for label, causal in itertools.product(DTYPES, (False, True)):
        problem = Problem(label, BLOCKS_HEADS, BLOCKS_LENGTH, causal)
        if time.perf_counter() > end:
            table.notes.append(f"Left out after {BLOCKS_SECONDS:.0f} s: {label}, causal {causal}.")
            continue
        tensors = random_tensors(problem, device)
        exact = exact_results(problem, tensors)["forward"]
        for block_m, block_n in TILES:
            yield f"{label}, {block_m} x {block_n}"
            keywords = {"causal": causal, "block_m": block_m, "block_n": block_n}
            keywords["input_precision"] = "tf32" if label == "TF32" else "ieee"
            run = functools.partial(step08_triton_lse.attention, *tensors[:3], **keywords)
            key = {"dtype": label, "mask": problem.key["mask"], "tile": f"{block_m} x {block_n}"}
            try:
                row = measured(problem, "forward", "8", run, clock, peaks[label])
                table.rows.append(key | row | {"error": error(run()[:1], exact)})
            except Exception as failure:  # a tile that does not fit shared memory is a result
                table.notes.append(f"{label}, {block_m} x {block_n}: {type(failure).__name__}: {failure}"[:200])
    return table
