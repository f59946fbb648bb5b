"""Rates of the kernels of forward mode from measured calls: `python benchmarks/tangent_rates.py FILE.csv [sm_80]`.

The file is what `benchmarks/derivatives.py --sweep FILE --candidates` or `--tiles` has printed on an H200. A kernel's
step takes what is left of a call's time, at the other rates of an H100; a tile and an edge take as many steps as usual.
Prints the lines of `src/flashtile/rates/h100.toml` for kernels that plans may choose, or with an older architecture,
as which they were compiled, of that one's file. They hold until
`flashtile calibrate --only tangents` has measured more calls.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

import torch
from derivatives import OF_HOPPER, label_of

from flashtile.api.explain import QKV, described_call
from flashtile.backend.gpu.cost import Cost
from flashtile.backend.gpu.rates import ESTIMATED, PARTS, Rates, rates_of_like
from flashtile.backend.hopper import support as hopper
from flashtile.backend.hopper.plan import cost as hopper_cost
from flashtile.backend.hopper.plan import tables as hopper_tables
from flashtile.backend.triton.plan import cost as triton_cost
from flashtile.backend.triton.plan.candidates import tangent_tiles
from flashtile.backend.triton.tile_config import KernelConfig, TileConfig
from flashtile.call.device import Device
from flashtile.call.problem import Problem

H200 = Device("cuda", "NVIDIA H200", "sm_90", 132, clock=1980, bandwidth=4.8e6)
STEPS = 60  # of a bisection


def cost_of(cell: str, label: str, device: Device) -> Cost | None:
    """The work of a dense call without a mask, by one kernel; `None` if no plan has that."""
    shape, *dtype = cell.split()
    batch, heads, tokens, dim = map(int, shape.split("x"))
    q = torch.empty(batch, heads, tokens, dim, dtype=getattr(torch, *(dtype or ["bfloat16"])), device="meta")
    problem = Problem.describe(described_call(q, q, q, None, None, {})).bucketed()
    backend, way = label.split(" ", 1)
    if backend == "triton":
        sizes = map(int, way.removeprefix("m").split("x"))
        tile = KernelConfig(*sizes, mma=way.startswith("m"))  # type: ignore[arg-type]
        if tile not in tangent_tiles(problem, device):
            return None
        return triton_cost.tangents(problem, device, TileConfig(tile, tile, tile, tangents=tile), QKV)
    config = next(x for x in OF_HOPPER[dim] if label_of(x) == way)
    if config not in hopper_tables.TANGENTS.get((dim, dim), ()):
        return None
    first = hopper.candidates(problem, H200, None)[0]
    forward = hopper_cost.forward(problem, H200, first.tile.forward, first.num_splits)
    return hopper_cost.tangents(problem, H200, forward, config, QKV)


def step_of(cost: Cost, microseconds: float, like: Rates) -> tuple[str, float]:
    """The kernel's name, and the time of its step at which the call takes as long as measured, with other rates of a
    `like` chip.
    """
    kernel = next(x for x in cost.counts if " tangents " in x and x.endswith(" step")).removesuffix(" step")
    rates = dict(like) | {name: like[name] for name in (*cost.counts, *cost.limits)}
    low, high = 0.0, microseconds
    for _ in range(STEPS):
        step = (low + high) / 2
        rates |= {f"{kernel} {part}": step * ESTIMATED[part] for part in PARTS}
        low, high = (low, step) if cost.time(rates) > microseconds else (step, high)
    return kernel, low


def lines(file: Path, arch: str) -> list[str]:
    device = H200 if arch == H200.arch else H200._replace(name=f"{arch} on {H200.name}", arch=arch)
    steps, like = defaultdict(list), rates_of_like(device)
    for row in csv.DictReader(file.read_text().splitlines()):
        if (cost := cost_of(row["cell"], row["backend, tile"], device)) is not None:
            kernel, step = step_of(cost, 1e3 * float(row["jvp ms"]), like)
            steps[kernel].append(step)
    found = []
    for kernel, times in sorted(steps.items()):
        parts = ", ".join(f"{part} = {median(times) * ESTIMATED[part]:.4g}" for part in PARTS)
        found.append(f'"{kernel}" = {{ {parts} }}')
    return found


if __name__ == "__main__":
    print("\n".join(lines(Path(sys.argv[1]), *(sys.argv[2:] or [H200.arch]))))
