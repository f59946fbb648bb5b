"""What the tables of `flashtile ladder` are made of: inputs, times, errors, rows."""

import gc
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import attention
from ...backend.rates import fastest
from ...ladder import step04_standard, step08_triton_lse, triton_or_not


@dataclass
class Table:
    """The findings of one set of measurements; `rows` have the same keys. Columns that begin with "published", and
    `asides`, are for `flashtile ladder` alone: the report shows what can be measured or looked up.
    """

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asides: list[str] = field(default_factory=list)
    ok: bool = True  # False where an error ended the measurement


Measurement = Generator[str, None, Table]  # yields a word on what it does next
Run = Callable[[], Any]


def inputs(n: int, d: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k, v `[N, d]`, the same for each call."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, d, generator=generator).to(device) for _ in range(3))
    return q, k, v


def milliseconds(run: Run, device: torch.device, seconds: float = 0.2) -> float:
    """The fastest of the runs during this time, one at least, after one that warms up: whatever else the machine does
    only adds to a time. Python's search for cycles, which step 2's many objects set off, waits until the end.
    """
    run()
    searches = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        best = fastest(run, device, repeats=1)
        while time.perf_counter() < end:
            best = min(best, fastest(run, device, repeats=1))
    finally:
        if searches:
            gc.enable()
    return best * 1e3


def error_of(out: Any, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The largest difference of an element of `out` from attention in fp64."""
    if isinstance(out, list):
        out = torch.tensor([[getattr(x, "data", x) for x in row] for row in out], dtype=torch.float64)
    right, _ = step04_standard.attention(q.cpu().double(), k.cpu().double(), v.cpu().double())
    return float((out.cpu().reshape(right.shape) - right).abs().max())


def first(result: Any) -> Any:
    """`out` of `(out, lse)`, or of a call that returns it alone."""
    return result[0] if isinstance(result, tuple) else result


def product(q: Tensor, k: Tensor, v: Tensor) -> Any:
    """Step 11: `flashtile.attention`, here on one head."""
    return attention(q[None, None], k[None, None], v[None, None])


def triton_compiles(device: torch.device) -> bool:
    """Whether step 8 runs as a kernel and not in Triton's interpreter, whose times say nothing."""
    return device.type == "cuda" and triton_or_not.unavailable(step08_triton_lse.kernel, device) is None
