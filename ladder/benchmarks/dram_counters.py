"""The bytes that the model predicts and those that a GPU's counters count: `python benchmarks/dram_counters.py`.

Each case runs in a process of its own under NVIDIA's profiler `ncu`, which counts what DRAM reads and writes during the
measured call alone. Working sets are many times the L2 cache. `--dry-run` prints the predictions and needs no GPU.
Tiles and cache are an H200's.
"""

import argparse
import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashtile.backend.hopper.plan.tables import FORWARD
from flashtile.backend.triton.plan import tables
from flashtile_ladder import iomodel
from flashtile_ladder.iomodel import Shape, Work, gpu

READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"


@dataclass(frozen=True)
class Case:
    """bfloat16; standard attention, the three kernels of the ladder's step 4, in float32."""

    kind: str  # forward, backward, decode or standard
    batch: int
    heads: int
    heads_kv: int
    seqlen: int
    head_dim: int
    causal: bool = False
    backend: str = "triton"

    @property
    def shape(self) -> Shape:
        rows = 1 if self.kind == "decode" else self.seqlen
        sizes = rows, self.seqlen, self.head_dim, self.head_dim, self.batch, self.heads, self.heads_kv
        return Shape(*sizes, causal=self.causal, itemsize=4 if self.kind == "standard" else 2)

    def predicted(self) -> Work:
        row = next(row for row in tables.HALF[227] if row.width >= self.head_dim)
        if self.kind == "forward":
            tile = FORWARD[self.head_dim, self.head_dim][0] if self.backend == "hopper" else row.forward
            return gpu.kernel_forward(self.shape, tile.block_m)
        if self.kind == "backward":
            return gpu.kernel_backward(self.shape, row.dq.block_m, row.dkdv.block_n)
        if self.kind == "decode":
            return iomodel.decode(self.shape)
        return iomodel.standard_forward(self.shape)


CASES = {
    "forward, 4k": Case("forward", 32, 16, 16, 4096, 128, backend="hopper"),
    "forward, 4k, causal": Case("forward", 32, 16, 16, 4096, 128, causal=True, backend="hopper"),
    "forward, 16k, grouped": Case("forward", 8, 32, 8, 16384, 128, causal=True, backend="hopper"),
    "forward, 64k": Case("forward", 2, 16, 16, 65536, 128, causal=True, backend="hopper"),
    "forward, 1k, d = 64": Case("forward", 128, 32, 32, 1024, 64, backend="hopper"),
    "forward, 4k, d = 64": Case("forward", 32, 32, 32, 4096, 64, backend="hopper"),
    "backward, 4k, causal": Case("backward", 32, 16, 16, 4096, 128, causal=True),
    "backward, 16k, causal": Case("backward", 8, 16, 16, 16384, 128, causal=True),
    "decode, 8k": Case("decode", 64, 32, 8, 8192, 128),
    "standard, 1k": Case("standard", 4, 32, 32, 1024, 64),
    "standard, 4k": Case("standard", 1, 16, 16, 4096, 64),
    "standard, 16k": Case("standard", 1, 1, 1, 16384, 64),
}


# In the profiled process ----------------------------------------------------------------------------------------------


def run_once(case: Case) -> None:
    """One call to compile and warm up, and one that is counted."""
    import torch

    call = prepared(case)
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def prepared(case: Case) -> Callable[[], Any]:
    import torch

    import flashtile

    shape, options = case.shape, {"device": "cuda", "dtype": torch.bfloat16}
    if case.kind == "standard":
        q, k, v = (torch.randn(case.batch, case.heads, case.seqlen, case.head_dim, device="cuda") for _ in range(3))
        return lambda: torch.softmax((case.head_dim**-0.5 * q) @ k.mT, dim=-1) @ v  # step 4's, without its lse
    q = torch.randn(case.batch, case.heads, shape.seqlen_q, case.head_dim, **options)
    k, v = (torch.randn(case.batch, case.heads_kv, case.seqlen, case.head_dim, **options) for _ in range(2))
    if case.kind != "backward":
        return lambda: flashtile.attention(q, k, v, causal=case.causal, backend=case.backend)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flashtile.attention(*leaves, causal=case.causal, backend=case.backend)
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# Around it ------------------------------------------------------------------------------------------------------------


class CountersError(RuntimeError):
    """ncu did not count; the message has what it wrote."""


def counted(name: str, ncu: str) -> dict[str, dict[str, int]]:
    """Bytes by kernel and metric, of all launches of the measured call."""
    command = [ncu, "--profile-from-start", "off", "--metrics", f"{READ},{WRITTEN}", "--csv", "--print-units", "base"]
    command += [sys.executable, __file__, "--run", name]
    done = subprocess.run(command, capture_output=True, text=True)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise CountersError("the driver gives counters to administrators alone (ERR_NVGPUCTRPERM)")
    found = bytes_of(done.stdout)
    if done.returncode != 0 or not found:
        raise CountersError(
            f"`{' '.join(command)}` ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return found


def bytes_of(text: str) -> dict[str, dict[str, int]]:
    """Bytes by kernel and metric, added up over launches."""
    found: dict[str, dict[str, int]] = {}
    for row in table_of(text):
        if row["Metric Unit"] != "byte":
            raise CountersError(f"ncu counts in {row['Metric Unit']!r}, not in bytes")
        kernel = found.setdefault(row["Kernel Name"], {READ: 0, WRITTEN: 0})
        kernel[row["Metric Name"]] += round(float(row["Metric Value"].replace(",", "")))
    return found


def table_of(text: str) -> list[dict[str, str]]:
    """ncu's table: one row for each launch and metric, after lines of its own."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    return list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))


def compared(name: str, case: Case, kernels: dict[str, dict[str, int]] | None) -> dict[str, Any]:
    work = case.predicted()
    row: dict[str, Any] = {"case": name, "predicted_read": work.read, "predicted_written": work.written}
    if kernels is None:
        return row
    read, written = (sum(kernel[metric] for kernel in kernels.values()) for metric in (READ, WRITTEN))
    row |= {"read": read, "written": written, "difference": (work.moved - read - written) / (read + written)}
    row["intensity"] = (work.flops + work.softmax) / (read + written)
    return row | {"kernels": kernels, "problem": asdict(case)}


def print_row(row: dict[str, Any]) -> None:
    words = f"{row['case']:24} predicted {row['predicted_read'] / 1e6:9.1f} + {row['predicted_written'] / 1e6:8.1f} MB"
    if "read" in row:
        words += f"   counted {row['read'] / 1e6:9.1f} + {row['written'] / 1e6:8.1f} MB   {row['difference']:+.1%}"
    print(words, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="predictions alone")
    parser.add_argument("--case", action="append", choices=CASES, help="may be repeated; default: all")
    parser.add_argument("--ncu", default="ncu", help="the profiler's command")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    parser.add_argument("--run", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_once(CASES[options.run])
        return 0
    ncu = shutil.which(options.ncu)
    if ncu is None and not options.dry_run:
        print(f"{options.ncu} is not there: it comes with the CUDA toolkit. --dry-run prints the predictions.")
        return 2
    rows, failed = [], False
    for name in options.case or CASES:
        kernels = None
        if ncu is not None and not options.dry_run:
            try:
                kernels = counted(name, ncu)
            except CountersError as error:
                failed = True
                print(f"{name}: not counted: {error}")
        rows.append(compared(name, CASES[name], kernels))
        print_row(rows[-1])
        if options.out:  # after each case: the next one may be stopped
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 2 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
