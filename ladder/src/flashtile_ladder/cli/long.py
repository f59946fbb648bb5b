"""The table `long` of `flashtile-ladder`: time and memory of standard and fused attention at d = 64."""

import functools
from typing import Any

import torch
from torch import Tensor

from .. import step04_standard, step06_flash2, step08_triton_lse
from .allocation import live_and_peak_bytes
from .gpu import NUMBA, TRITON, gpu_steps, missing_gpu_steps
from .library import STEP, one_head
from .measure import Measurement, Run, Table, error_of, first, in_tf32, inputs, timed

MIB = 2**20
LONG_LENGTHS = (1024, 2048, 4096)
LONGER_LENGTHS = (8192, 16384, 32768, 65536)  # on a GPU
LONG_PUBLISHED = {  # speed-up, MB of standard, MB of fused
    1024: (2.1, 8.0, 0.25),
    2048: (1.6, 32.0, 0.5),
    4096: (3.6, 128.0, 1.0),
}
# Steps that leave most of a GPU idle take minutes beyond these.
MOST = {"6 FlashAttention-2": 8192, "9 CUDA C++, rows": 8192, NUMBA: 16384}
THREE_KERNELS, KEPT_BUFFERS = "4 without lse", "4 with kept buffers"
IN_TF32 = {"4 without lse, TF32": THREE_KERNELS, f"{STEP}, TF32": STEP}
CHECKED_ROWS = 64  # of q, whose results are compared: fp64 over all rows of a long sequence would not fit


def long(device: torch.device, lengths: tuple[int, ...] | None = None, seconds: float = 0.2) -> Measurement:
    table = Table("long", "Long sequences: one head, d = 64, standard (step 4) against fused")
    table.see = (
        "Memory of standard attention grows as N², that of fused attention as N; who is faster depends on what limits "
        "this machine."
    )
    lengths = lengths or LONG_LENGTHS + (LONGER_LENGTHS if device.type == "cuda" else ())
    if device.type == "cuda":
        table.notes += missing_gpu_steps(device)
    for n in lengths:
        q, k, v = inputs(n, 64, device)
        runs: dict[str, Run] = {
            "4 standard PyTorch": lambda q=q, k=k, v=v: step04_standard.attention(q, k, v),
            THREE_KERNELS: lambda q=q, k=k, v=v: torch.softmax(step04_standard.scaled(q, None) @ k.mT, dim=-1) @ v,
            "6 FlashAttention-2": lambda q=q, k=k, v=v: step06_flash2.attention(q, k, v),
            STEP: lambda q=q, k=k, v=v: one_head(q, k, v),
        }
        if device.type == "cuda":
            runs |= {name: prepare(q, k, v) for name, prepare in gpu_steps(device).items()}
            runs |= {name: in_tf32(runs[of]) for name, of in IN_TF32.items() if of in runs}
            if TRITON in runs:
                runs[f"{TRITON}, TF32"] = functools.partial(
                    step08_triton_lse.attention, q, k, v, input_precision="tf32"
                )
        else:
            runs |= {KEPT_BUFFERS: with_kept_buffers(q, k, v)}
        standard = None
        for name, run in runs.items():
            if n > MOST.get(name, n):
                table.notes.append(f"{name} is left out at N = {n}: it would take too long.")
                continue
            yield f"{name}, N = {n}"
            try:
                row = table.add(
                    {"n": n, "step": name},
                    lambda name=name, run=run, qkv=(q, k, v), other=standard: compared(
                        name, long_row(run, device, qkv, seconds), other, len(qkv[0])
                    ),
                )
            except torch.OutOfMemoryError as error:
                table.notes.append(f"{name} does not fit at N = {n}: {str(error).splitlines()[0]}")
                continue
            if name == THREE_KERNELS:
                standard = row
    table.notes.append(f"Speed-up and saving are over “{THREE_KERNELS}”: an lse takes further passes over S.")
    table.notes.append(
        "Memory is what the call allocates at most, results included (out alone: N d floats). Where tiles are tensors "
        f"of torch, they count; in a kernel they would not. The error is that of the last {CHECKED_ROWS} rows."
    )
    table.asides.append("Published memory: S and P against out.")
    return table


def with_kept_buffers(q: Tensor, k: Tensor, v: Tensor) -> Run:
    """The three kernels, with S, P and O in buffers that are made once: the allocator has no part in the time."""
    n = len(q)
    s, p, out = q.new_empty((n, n)), q.new_empty((n, n)), torch.empty_like(q)

    def run() -> Tensor:
        torch.mm(step04_standard.scaled(q, None), k.mT, out=s)
        torch.softmax(s, -1, out=p)
        return torch.mm(p, v, out=out)

    return run


def long_row(run: Run, device: torch.device, qkv: tuple[Tensor, Tensor, Tensor], seconds: float) -> dict[str, Any]:
    q, k, v = qkv
    _, peak = live_and_peak_bytes(run, device)
    row: dict[str, Any] = timed(run, device, seconds) | {"extra_mib": peak / MIB}
    out = first(run()).reshape(q.shape)
    row["error"] = error_of(out[-CHECKED_ROWS:], q[-CHECKED_ROWS:], k, v)
    return row if device.type == "cuda" else row | {"page_faults": page_faults(run)}


def page_faults(run: Run) -> int | None:
    """Pages that the system hands out during one call; `None` where it does not count them."""
    try:
        import resource
    except ImportError:
        return None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    run()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def compared(name: str, row: dict[str, Any], standard: dict[str, Any] | None, n: int) -> dict[str, Any]:
    """The row with its ratios to standard attention, where that fits, and with published figures."""
    fused = not name.startswith("4")
    speedup, standard_mb, fused_mb = LONG_PUBLISHED.get(n, (None, None, None))
    other = standard if fused or name in (KEPT_BUFFERS, *IN_TF32) else None
    return row | {
        "speedup": other["ms"] / row["ms"] if other else None,
        "saving": other["extra_mib"] / max(row["extra_mib"], 1 / MIB) if other and fused else None,
        "published_speedup": speedup if fused else None,
        "published_mib": fused_mb if fused else standard_mb,
        "published_saving": standard_mb / fused_mb if fused and standard_mb and fused_mb else None,
    }
