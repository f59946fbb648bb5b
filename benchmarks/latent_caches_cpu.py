"""Decoding over a dense cache of latent rows on a CPU: `python benchmarks/latent_caches_cpu.py --store FILE.csv`.

Rows have 576 features, the first 512 of them values, one query a sequence. The read is a sum by PyTorch over the same
bytes, by as many threads. Both take turns: times are of the processor, summed over threads, as other programs may run
on the machine. The share is the read's time divided by the call's, a median over rounds with quantiles of 20% and 80%.
The caches have 302 MB and more.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import csv_rows
import torch

import flashtile
from flashtile.bench.rounds import band

D, DV, SCALE = 576, 512, 192**-0.5
SHAPES = ((16, 1, 16384), (16, 4, 16384), (16, 16, 16384), (1, 16, 262144), (16, 128, 16384))  # batch, heads, keys
DTYPES = (torch.bfloat16, torch.float32)
FIELDS = ("batch", "heads", "keys", "dtype", "ms", "GB/s a thread", "GFLOP/s a thread", "share", "low", "high")


def seconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measured(batch: int, heads: int, keys: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    torch.manual_seed(0)
    q, rows = torch.randn(batch, heads, 1, D, dtype=dtype), torch.randn(batch, 1, keys, D, dtype=dtype)
    numbers = rows.view(torch.float32)

    def call() -> torch.Tensor:
        return flashtile.attention_with_kvcache(q, rows, None, v_dim=DV, cache_seqlens=keys, scale=SCALE)

    runs: tuple[Callable[[], Any], ...] = (call, numbers.sum)
    for run in runs:
        run()
    own, read = zip(*(tuple(map(seconds, runs)) for _ in range(rounds)), strict=True)
    shares = band([there / here for here, there in zip(own, read, strict=True)])
    time_of_call = band(own).median
    rates = rows.nbytes / time_of_call / 1e9, 2 * batch * heads * keys * (D + DV) / time_of_call / 1e9
    values = (
        batch, heads, keys, str(dtype).removeprefix("torch."), f"{1e3 * time_of_call:.1f}", f"{rates[0]:.1f}",
        f"{rates[1]:.0f}", *(f"{x:.3f}" for x in shares),
    )  # fmt: skip
    return dict(zip(FIELDS, values, strict=True))


@click.command(help=__doc__)
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file for all rows.")
@click.option("--rounds", default=7, show_default=True)
def main(store: Path | None, rounds: int) -> None:
    found = []
    for dtype in DTYPES:
        for shape in SHAPES:
            found.append(measured(*shape, dtype, rounds))
            click.echo(", ".join(str(x) for x in found[-1].values()))
    if store is not None:
        csv_rows.write(store, FIELDS, found)


if __name__ == "__main__":
    main()
