"""Time each kernel of a call with a mask: attention's, and those that find the mask's blocks and pairs:

    python benchmarks/mask_kernels.py --store FILE.jsonl --processes 8

Each row of the file has the microseconds of every kernel of a pass, by the profiler, medians of `--rounds`. Lists and
bits are to take less than 3% of the pass from 8192 positions on. `--processes` compile beforehand.
"""

import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from mask_calls import Cell, mask_of
from torch.profiler import ProfilerActivity, profile

import flashtile

MASKS = ("document", "causal document", "window 1023", "prefix")
OF_MASKS = ("visible_blocks", "key_lists", "pair_bits", "mask_states")  # in the names of kernels
CELLS = [
    Cell(mask=mask, batch=batch, seqlen=seqlen, head_dim=head_dim)
    for batch, seqlen in ((2, 8192), (1, 32768), (1, 98304))
    for head_dim in (64, 128)
    for mask in MASKS
    if seqlen < 65536 or head_dim == 128
]


def passes_of(cell: Cell) -> dict[str, Callable[[], Any]]:
    """Forward and backward of a cell's call."""
    device = torch.device("cuda")
    shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    mask = mask_of(cell, device)
    assert mask is not None
    forward = partial(flashtile.attention, *leaves, mask=mask.own)
    backward = partial(torch.autograd.grad, forward(), leaves, dout, retain_graph=True)
    return {"forward": forward, "backward": backward}


def kernel_times(run: Callable[[], Any], rounds: int) -> dict[str, float]:
    """The median microseconds of each kernel."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            run()
        torch.cuda.synchronize()
    times = defaultdict(list)
    for event in profiler.events() or ():
        if event.device_time_total > 0:
            times[event.name].append(event.device_time_total)
    # A kernel that a pass launches more than once counts as often.
    return {name: round(statistics.median(x) * max(1, len(x) // rounds), 2) for name, x in times.items()}


def share_of_masks(times: dict[str, float]) -> tuple[float, float]:
    """Microseconds of the kernels of masks, and their part of all."""
    of_masks = sum(x for name, x in times.items() if any(word in name for word in OF_MASKS))
    return of_masks, of_masks / sum(times.values())


@click.command()
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A JSON Lines file, which is extended.")
@click.option("--processes", default=0, help="Processes that compile beforehand.")
@click.option("--cell", "chosen", multiple=True, help="Its name; may be repeated.  [default: all]")
@click.option("--rounds", default=5, show_default=True, help="0 compiles only.")
def main(store: Path | None, processes: int, chosen: tuple[str, ...], rounds: int) -> None:
    """Measure all cells, or those that are chosen."""
    begin = time.monotonic()
    cells = [cell for cell in CELLS if not chosen or str(cell) in chosen]
    running = []
    for n in range(processes):
        words = [word for cell in cells[n::processes] for word in ("--cell", str(cell))]
        running.append(subprocess.Popen([sys.executable, __file__, "--rounds", "0", *words]))
    for process in running:
        process.wait()
    for cell in cells:
        for direction, run in passes_of(cell).items():
            if rounds == 0:
                run()
                continue
            times = kernel_times(run, rounds)
            of_masks, share = share_of_masks(times)
            click.echo(f"{time.monotonic() - begin:.0f} s: {cell} {direction}: {of_masks:.1f} us, {share:.2%}: {times}")
            if store:
                row = {"cell": str(cell), "pass": direction, "device": torch.cuda.get_device_name(), "us": times}
                with store.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
