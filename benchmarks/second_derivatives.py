"""Second derivatives beside the backward pass and dense attention on a GPU:

    python benchmarks/second_derivatives.py [--out FILE.csv] [--rows 64x64x4x2,...] [--keys 64x32x4x2,...]
        [--wide 64x64x4x2/128x64x8x3/64x128x8x3/128/1,...] [--memory]

Device milliseconds of each cell of `derivatives.toml`, medians of rounds: the backward pass of the three gradients
(`second`), the backward pass and the forward pass of attention, and `second` of dense attention. `--rows` and `--keys`
time the kernels with other tiles of rows, keys, warps and stages, each beside the planned tile of the other kernel;
`--wide` times kernels of wide heads: tiles of weights, of sums for rows and for keys, the columns of a sum, and the
programs of a core that sums for rows are divided into. `--memory` adds the peak MiB that the second derivative
allocates beyond its inputs and results.
"""

import contextlib
import csv
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import click
import torch
from derivatives import Cell, device_time, providers

from flashtile.as_arch import ARCHITECTURES, install
from flashtile.backend.triton.plan import tables
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.bench.allocation import live_and_peak_bytes
from flashtile.dispatch import fast_path
from flashtile.dispatch.planner import forget_plans

SWEEP = Path(__file__).with_name("derivatives.toml")
COLUMNS = (
    "cell",
    "tiles",
    "second ms",
    "backward ms",
    "forward ms",
    "dense ms",
    "times backward",
    "times dense",
    "MiB",
)


def passes(attention: Callable[..., Any], cell: Cell) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The second derivative and the backward pass, with everything before them done."""
    leaves = [x.detach().requires_grad_() for x in cell.inputs]
    out = attention(*leaves)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, create_graph=True)
    return (
        lambda: torch.autograd.grad(first, leaves, cell.tangents, retain_graph=True),
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    )


def tile_of(text: str) -> KernelConfig:
    block_m, block_n, num_warps, num_stages = (int(n) for n in text.split("x"))
    return KernelConfig(block_m, block_n, num_warps, num_stages)


@contextlib.contextmanager
def forced(rows: str, keys: str, wide: str) -> Iterator[None]:
    """Second derivatives by these tiles, where they are given."""
    given = {
        (f"second {side}", "half"): ((512, tile_of(text)),) for side, text in (("rows", rows), ("keys", keys)) if text
    }
    blocked = tables.BLOCKED["half"]
    if wide:
        *tiles, columns, programs = wide.split("/")
        sizes: dict[str, Any] = dict(zip(("weights", "rows", "keys"), map(tile_of, tiles), strict=True))
        blocked = blocked._replace(**sizes, columns=int(columns), programs=int(programs))
    fast_path.forget()
    forget_plans()
    with mock.patch.dict(tables.MORE, given), mock.patch.dict(tables.BLOCKED, half=blocked):
        yield
    fast_path.forget()
    forget_plans()


def peak_mebibytes(run: Callable[[], Any]) -> float:
    left, peak = live_and_peak_bytes(run, torch.device("cuda"))
    return (peak - left) / 2**20


def measure(cell: Cell, tiles: list[tuple[str, str, str]], rounds: int, memory: bool, writer: Any) -> None:
    second, backward = passes(cell.attention, cell)
    with torch.no_grad():
        forward_time = device_time(lambda: cell.attention(*cell.inputs), rounds)
    backward_time, dense_time = device_time(backward, rounds), None
    if cell.has_dense and cell.group == 1:
        with contextlib.suppress(torch.OutOfMemoryError):
            dense_time = device_time(passes(providers(cell.causal)["dense"], cell)[0], 2)
    for tile in tiles:
        try:
            with forced(*tile):
                own = device_time(second, rounds)
                peak = peak_mebibytes(second) if memory else None
        except Exception as error:  # a tile that no program has the memory for
            writer.writerow([cell.name, " ".join(tile), f"{type(error).__name__}: {error}"[:80]])
            continue
        times = [own / backward_time, dense_time and dense_time / own]
        figures = [own, backward_time, forward_time, dense_time, *times, peak]
        writer.writerow([cell.name, " ".join(tile).strip(), *("" if x is None else f"{x:.4g}" for x in figures)])


@click.command(help=__doc__)
@click.option("--rows", default="", help="Tiles of the kernel for rows.")
@click.option("--keys", default="", help="Tiles of the kernel for keys.")
@click.option("--wide", default="", help="Tiles of the kernels of wide heads, and columns of a sum.")
@click.option("--memory", is_flag=True, help="Peak memory, too.")
@click.option("--cell", "words", multiple=True, help="Only cells whose names contain one of these.")
@click.option("--rounds", default=5)
@click.option("--as-arch", type=click.Choice(ARCHITECTURES), help="Compile our kernels as for an older chip.")
@click.option("--out", type=click.File("a"), default=sys.stdout, help="CSV file to append to.")
def main(
    rows: str,
    keys: str,
    wide: str,
    memory: bool,
    words: tuple[str, ...],
    rounds: int,
    as_arch: str | None,
    out: TextIO,
) -> None:
    if as_arch is not None:
        install(as_arch)
    settings = tomllib.loads(SWEEP.read_text())
    tiles = [("", "", ""), *((x, "", "") for x in rows.split(",") if x), *(("", x, "") for x in keys.split(",") if x)]
    tiles += [("", "", x) for x in wide.split(",") if x]
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for given in settings["cells"]:
        cell = Cell(given, getattr(torch, given.get("dtype", settings["dtype"])), settings["longest_dense"])
        if words and not any(x in cell.name for x in words):
            continue
        measure(cell, tiles, rounds, memory, writer)
        out.flush()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
