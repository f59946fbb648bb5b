"""Parts of the tables of `flashtile-ladder`: inputs, times, errors, rows."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import step08_triton_lse
from .._host import triton_or_not
from .._host.alone import exact
from .rates import once
from .stored import slow_rows


@dataclass
class Table:
    """The findings of one set of measurements; `rows` have the same keys. Columns that begin with "published", `see`
    and `asides` are for `flashtile-ladder` alone: the report shows what can be measured or looked up.
    """

    name: str
    title: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    asides: list[str] = field(default_factory=list)
    ok: bool = True  # False where an error ended the measurement
    see: str = ""  # one sentence: what to look at
    row_seconds: list[float] = field(default_factory=list)  # that measuring each row took

    def add(self, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Append the row of `key` and of what `measure` returns, and return it; a slow one is the stored run's."""
        for stored in slow_rows.get():
            if stored.table == self.name and key.items() <= stored.row.items():
                words = ", ".join(f"{name} = {value}" for name, value in key.items())
                source = f"Stored, from {stored.machine['device']}: {words}"
                self.notes.append(f"{source}. It took {stored.seconds:.0f} s; --all measures it.")
                self.rows.append(stored.row)
                self.row_seconds.append(0.0)
                return stored.row
        start = time.perf_counter()
        row = key | measure()
        self.rows.append(row)
        self.row_seconds.append(time.perf_counter() - start)
        return row


Measurement = Generator[str, None, Table]  # yields a word on what it does next
Run = Callable[[], Any]


def inputs(n: int, d: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k, v `[N, d]`, the same for each call."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, d, generator=generator).to(device) for _ in range(3))
    return q, k, v


def timed(run: Run, device: torch.device, seconds: float = 0.2, prefix: str = "") -> dict[str, float]:
    """`ms`, the fastest of the runs during this time, and `median_ms`; the keys begin with `prefix`.

    The fastest is what the code takes, because all else that the machine does only adds to a time; the median says how
    quiet the machine was. One run warms up, and two are timed at least. Python's search for cycles, which step 2's many
    objects set off, waits until the end.
    """
    run()
    searches = gc.isenabled()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        found = [once(run, device) for _ in range(2)]
        while time.perf_counter() < end:
            found.append(once(run, device))
    finally:
        if searches:
            gc.enable()
    return {f"{prefix}ms": min(found) * 1e3, f"{prefix}median_ms": statistics.median(found) * 1e3}


DISTURBED = 2.0  # the median over the fastest: from here on the machine was not quiet


def disturbed(table: Table) -> str | None:
    """A warning where medians are twice the fastest times or more; `None` where all are near."""
    pairs = [
        (row[name], row[name[: -len("ms")] + "median_ms"])
        for row in table.rows
        for name in row
        if name.endswith("ms") and name[: -len("ms")] + "median_ms" in row
    ]
    far = [median / least for least, median in pairs if median >= DISTURBED * least]
    if not far:
        return None
    return (
        f"The machine was not quiet: {len(far)} of {len(pairs)} times have a median that is {DISTURBED:.0f} times the "
        f"fastest run or more, up to {max(far):.1f} times."
    )


def error_of(out: Any, q: Tensor, k: Tensor, v: Tensor) -> float:
    """The largest difference of an element of `out` from attention in fp64."""
    if isinstance(out, list):
        out = torch.tensor([[getattr(x, "data", x) for x in row] for row in out], dtype=torch.float64)
    right = exact(q, k, v)
    return float((out.cpu().reshape(right.shape) - right).abs().max())


def first(result: Any) -> Any:
    """`out` of `(out, lse)`, or of a call that returns it alone."""
    return result[0] if isinstance(result, tuple) else result


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, as the steps before PyTorch's have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """PyTorch's products of float32 in TF32, on tensor cores; step 11 follows this setting."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def in_tf32(run: Run) -> Run:
    """The same call with products in TF32."""

    def call() -> Any:
        with tf32_products():
            return run()

    return call


def triton_compiles(device: torch.device) -> bool:
    """Whether step 8 runs as a kernel and not in Triton's interpreter, whose times say nothing."""
    return device.type == "cuda" and triton_or_not.unavailable(step08_triton_lse.kernel, device) is None
