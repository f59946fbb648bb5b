"""Cycles of a GPU for an instruction, by size of a loop: `python benchmarks/instruction_fetch.py --store FILE.csv`.

A loop of independent multiplications and additions issues one a cycle and scheduler, as long as instructions arrive.
Each core has one warp a scheduler, two warps that run one copy of the loop, or two with a copy each, as partitions of a
specialized kernel have. A scheduler's cycles count for the instructions of all its warps. KiB are a copy's.
"""

from pathlib import Path
from typing import Any

import click
import csv_rows
import torch
import triton
import triton.language as tl
from torch import Tensor

SIZES = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144)  # instructions of 16 bytes
INSTRUCTIONS = 200_000  # that a warp runs
SCHEDULERS, CHAINS, CONSTANTS = 4, 4, 14
WARPS = (("one", 1, 1), ("two, one copy", 2, 1), ("two, a copy each", 1, 2))  # of a scheduler: in a program; programs
FIELDS = ("KiB", *(name for name, _, _ in WARPS))


def loop_body(size: int, shift: int) -> str:
    """PTX of `size` instructions in chains, each $n = $n * constant + constant. Shifted constants make another copy."""
    chains = [f"mov.f32 ${n}, ${n + CHAINS};" for n in range(CHAINS)]
    constants = [f"0f3F7FFFF{(n // CHAINS + shift) % CONSTANTS + 1:X}" for n in range(size)]
    steps = [f"fma.rn.f32 ${n % CHAINS}, ${n % CHAINS}, {x}, 0f3A83126F;" for n, x in enumerate(constants)]
    return "{" + " ".join(chains + steps) + "}"


@triton.jit
def steps(a, b, c, d, PTX: tl.constexpr):
    return tl.inline_asm_elementwise(
        PTX, "=&f,=&f,=&f,=&f,f,f,f,f", [a, b, c, d],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def cycle(x):
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l,r", [x], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def loop_kernel(out, cycles, n, FIRST: tl.constexpr, OTHER: tl.constexpr, THREADS: tl.constexpr, CORES: tl.constexpr):
    """The first CORES programs run one copy, those behind them the other one."""
    thread, program = tl.arange(0, THREADS), tl.program_id(0)
    a = thread.to(tl.float32)
    b, c, d = a + 1, a + 2, a + 3
    start = cycle(thread)
    if program < CORES:
        for _ in range(n):
            a, b, c, d = steps(a, b, c, d, FIRST)
    else:
        for _ in range(n):
            a, b, c, d = steps(a, b, c, d, OTHER)
    tl.store(cycles + program * THREADS + thread, cycle(thread) - start)
    tl.store(out + program * THREADS + thread, a + b + c + d)


def cycles_of(size: int, warps: int, programs: int) -> float:
    """Cycles of a scheduler for an instruction, the mean over threads."""
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    num_warps, times = SCHEDULERS * warps, INSTRUCTIONS // size
    threads = 32 * num_warps
    out: Tensor = torch.empty(cores * programs * threads, device="cuda")
    cycles = torch.empty_like(out, dtype=torch.int64)
    copies = loop_body(size, 0), loop_body(size, CONSTANTS // 2)
    for _ in range(2):  # the first run loads the code
        loop_kernel[(cores * programs,)](out, cycles, times, *copies, threads, cores, num_warps=num_warps)
    return cycles.double().mean().item() / (times * size * warps * programs)


@click.command()
@click.option("--store", type=click.Path(path_type=Path), help="CSV file for the results.")
def main(store: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        found = {name: f"{cycles_of(size, warps, programs):.2f}" for name, warps, programs in WARPS}
        rows.append({"KiB": size * 16 // 1024, **found})
        click.echo(str(rows[-1]))
    if store is not None:
        csv_rows.write(store, FIELDS, rows)


if __name__ == "__main__":
    main()
