"""Skip this file when you learn: it runs one step by itself, `python -m flashtile_ladder 5`.

It prints a result, its largest error against attention in fp64, and the bytes that the step moves, beside those of the
step that it follows from; then its time, with the reason why it is more or less. A step that needs a GPU, a compiler or
a package that is not here says so.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import STEPS, Step
from ..measure.counted import count

FOLDER = Path(__file__).parents[1]
SMALL, LARGE = (64, 16), (512, 64)  # N, d: up to step 3, whose loops are Python's or C++'s, and from step 4 on
SIMULATED = (64, 16)  # where the processor runs the threads of a GPU one after the other
SECONDS = 0.3  # of timing


class Bytes(NamedTuple):
    """What a step moves between its two memories, and how that is known."""

    read: int
    written: int
    how: str

    @property
    def total(self) -> int:
        return self.read + self.written

    def __str__(self) -> str:
        return f"{self.read / 1e6:.3g} MB read, {self.written / 1e6:.3g} MB written, {self.how}"


def run(file: str, steps: Sequence[Step] = STEPS) -> int:
    """Print what the step in this file does. Returns 1 where it cannot run here, else 0."""
    torch.set_num_threads(1)
    number, step = next((i, step) for i, step in enumerate(steps) if step.file == Path(file).name)
    q, k, v = inputs(step)
    device = q.device
    show(f"Step {step.number}", f"{step.name}: {step.changed}")
    show("", f"one head, N = {q.shape[0]}, d = {q.shape[1]}, on {'the GPU' if device.type == 'cuda' else 'the CPU'}")
    try:
        found = call(step, q, k, v)()
    except (RuntimeError, ValueError) as problem:
        print(f"cannot run: {problem}")
        emulates = step.on_gpu and step.module != "step09_hopper" and "not installed" not in str(problem)
        if emulates and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            show("without a GPU", f"python -m flashtile_ladder --emulate {step.module}")
        show_next(steps[number:])
        return 1
    title, right = ("out", [exact(q, k, v)]) if step.runs == "attention" else ("dq", exact_gradients(q, k, v))
    show(f"{title}[0, :4]", ", ".join(f"{x:.6f}" for x in first(found)[0, :4].tolist()))
    pairs = zip([first(found), *found[1:]], right, strict=False)  # of attention out alone
    show("largest error, from fp64", f"{max(float((x.cpu().double() - y).abs().max()) for x, y in pairs):.1e}")
    moved = bytes_moved(step, q, k, v)
    show("bytes", str(moved))
    before = next((x for x in steps if x.module == step.after), None)
    if before is not None:
        compare_bytes(moved, before, q, k, v, step.runs)
    compare_times(step, before, q, k, v)
    show("still open", step.still_open)
    show_next(steps[number:])
    return 0


def show_next(steps: Sequence[Step]) -> None:
    """Where the first of these is read, and how the second is run."""
    show("read", str(FOLDER / steps[0].file))
    if len(steps) > 1:
        show("run next", f"python -m flashtile_ladder {steps[1].module}")


def show(title: str, words: str) -> None:
    print(f"{title:28} {words}".rstrip())


def compare_bytes(moved: "Bytes | str", before: Step, q: Tensor, k: Tensor, v: Tensor, runs: str) -> None:
    """The bytes of the step before on the same tensors."""
    earlier = bytes_moved(before, q, k, v, runs)
    words = str(earlier)
    if isinstance(moved, Bytes) and isinstance(earlier, Bytes):
        ratio = moved.total / earlier.total
        words += ": as many" if ratio == 1 else f": this one moves {shared(ratio)}"
    show(f"those of step {before.number}", f"{words} ({before.name})")


def shared(ratio: float) -> str:
    """A ratio in words, below 1 as percent."""
    return f"{ratio:.2g} times that" if ratio > 1 else f"{100 * ratio:.2g}% of that"


def compare_times(step: Step, before: Step | None, q: Tensor, k: Tensor, v: Tensor) -> None:
    """The time, that of the step before, and why they differ."""
    device = q.device
    interpreted = device.type == "cpu" and step.on_gpu
    words = " of an emulation" if interpreted else ""
    show("time", f"{milliseconds(call(step, q, k, v), device):.4g} ms{words}")
    if before is not None:
        try:
            show(
                f"that of step {before.number}",
                f"{milliseconds(call(before, q, k, v, step.runs), device):.4g} ms, {before.name}",
            )
        except (RuntimeError, ValueError) as problem:  # it needs what is not here, or takes other sizes
            show(f"that of step {before.number}", f"not here: {problem}")
    why = "one processor does the work of all threads, which says nothing of a GPU. There: " if interpreted else ""
    show("why", why + step.time)


def inputs(step: Step) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k, v `[N, d]`, of a size that the step does in a moment."""
    device = device_for(step)
    n, d = SMALL if step.number < 4 else LARGE
    simulated = step.module == "step07_numba_cuda" and os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"
    if simulated or (step.number == 9 and device.type == "cpu"):
        n, d = SIMULATED
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((n, d), generator=generator).to(device) for _ in range(3))
    return q, k, v


def device_for(step: Step) -> torch.device:
    """The GPU for a step that needs one, where there is one; interpreters take the CPU's tensors."""
    return torch.device("cuda" if step.on_gpu and torch.cuda.is_available() else "cpu")


def call(step: Step, q: Tensor, k: Tensor, v: Tensor, runs: str = "") -> Callable[[], Any]:
    """`attention` of the step on these tensors, in the form and dtype that it takes; or `backward`, with v as dout."""
    module = step.load()
    if (runs or step.runs) == "backward":
        out, lse = module.attention(q, k, v)
        return lambda: module.backward(q, k, v, out, lse, v)
    if step.module == "step02_autograd":
        values = [module.values(x.tolist()) for x in (q, k, v)]
        return lambda: module.attention(*values)
    if not step.tensors:
        rows = [x.tolist() for x in (q, k, v)]
        return lambda: module.attention(*rows)
    if step.halves:
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


def exact_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """dq, dk, dv `[N, d]` of the same in fp64, for v as dout."""
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    return list(torch.autograd.grad(exact(*leaves), leaves, v.cpu().double()))


def bytes_moved(step: Step, q: Tensor, k: Tensor, v: Tensor, runs: str = "") -> Bytes | str:
    """Reads and writes of HBM: counted where a step slices tensors, else from the bounds of its loops."""
    n, d = q.shape
    module = step.load()
    if step.module == "step08_triton_backward":  # delta; a block of keys reads all rows, a block of rows all keys
        visits = math.ceil(n / step.rows)
        read = 2 * n * d + (2 * n * d + visits * (2 * n * d + 2 * n)) + (2 * n * d + 2 * n + visits * 2 * n * d)
        return Bytes(4 * read, 4 * (n + 3 * n * d), "from its loops")
    if runs == "backward":
        q, k, v = (x.cpu() for x in (q, k, v))
        counts, _ = count(module.backward, [q, k, v, *module.attention(q, k, v), v])
        return Bytes(counts["read"], counts["written"], "counted")
    if step.counted:
        function = module.attention_in_kernels if step.module == "step04_standard" else module.attention
        counts, _ = count(function, [q.cpu(), k.cpu(), v.cpu()])
        return Bytes(counts["read"], counts["written"], "counted")
    if step.module == "step02_autograd":
        out, _ = module.attention(*(module.values(x.tolist()) for x in (q, k, v)))
        nodes = len(module.in_order([x for row in out for x in row]))
        return f"a graph of {nodes:,} nodes, counted; each is a Python object"
    if step.number < 4:  # the loops of step 2: each row of Q meets all rows of K and V
        itemsize = 8 if step.number == 2 else 4
        return Bytes(itemsize * (n * d + 2 * n * n * d), itemsize * n * (d + 1), "from its loops")
    size = 2 if step.halves else 4
    if step.module == "step09_cuda_rows":  # step 5's order: O, l and m come and go for each block of keys
        visits = math.ceil(n / module.macros["BLOCK_N"])
        read = size * (2 * n * d + visits * n * (2 * d + 2))
        return Bytes(read, size * (visits * n * (d + 2) + n), "from its loops")
    visits = math.ceil(n / step.rows)
    return Bytes(size * (n * d + visits * 2 * n * d), size * n * d + 4 * n, "from its loops")


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
