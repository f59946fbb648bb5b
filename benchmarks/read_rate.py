"""Decoding beside a plain read of its keys and values: `python benchmarks/read_rate.py --store FILE.csv`.

One query a sequence, 32 query and 8 key heads, bfloat16, keys in one piece and in pages in random order. The read is a
sum by PyTorch over the same bytes. Both are captured in CUDA graphs and take turns; the share is the read's time
divided by the call's, a median over rounds with quantiles of 20% and 80%. Nothing fits into the L2 cache.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import csv_rows
import torch
from torch import Tensor

import flashtile
from flashtile.as_arch import ARCHITECTURES, install
from flashtile.bench.clocks import clock_of
from flashtile.bench.rounds import Entrant, band, interleave
from flashtile.bench.sweep import Timing

HEADS, KV_HEADS = 32, 8
SHAPES = ((1, 65536, 64), (32, 4096, 64), (1, 32768, 128), (8, 8192, 128), (64, 2048, 128))  # batch, keys, features
PAGES = (16, 64, 256)
BOUND = 0.02  # of the largest difference, relative to the largest element
FIELDS = ("batch", "seqlen_k", "head_dim", "page_size", "us", "GB/s", "share", "low", "high")


def calls(batch: int, seqlen: int, head_dim: int) -> Iterator[tuple[int | str, Tensor, Callable[[], Tensor]]]:
    """Page size, keys and values, and the call; without pages first."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(batch, HEADS, 1, head_dim, **options)
    cache = torch.randn(2, batch, seqlen, KV_HEADS, head_dim, **options)
    lengths = torch.full((batch,), seqlen, dtype=torch.int32, device="cuda")
    k, v = cache.transpose(2, 3)
    yield "", cache, lambda: flashtile.attention_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True)
    for size in PAGES:
        order = torch.randperm(batch * seqlen // size, device="cuda")
        pages = torch.empty_like(cache).view(2, -1, size, KV_HEADS, head_dim)
        pages[:, order] = cache.view(pages.shape)
        table = order.view(batch, -1).int()
        keywords = {"cache_seqlens": lengths, "page_table": table, "causal": True}
        yield (
            size,
            pages,
            lambda pages=pages, keywords=keywords: flashtile.attention_with_kvcache(q, *pages, **keywords),
        )


def measured(batch: int, seqlen: int, head_dim: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of one shape."""
    torch.manual_seed(0)
    clock, expected = clock_of(torch.device("cuda")), None
    for size, cache, call in calls(batch, seqlen, head_dim):
        found = call().float()
        expected = found if expected is None else expected
        if not (found - expected).abs().max() <= BOUND * expected.abs().max():
            raise click.ClickException(f"pages of {size}: another result than without pages")
        numbers = cache.view(torch.float32)
        own, read = (Entrant(name, clock.replayable([run])) for name, run in (("own", call), ("read", numbers.sum)))
        interleave(clock, [own, read], Timing(rounds=rounds, sample_seconds=0.01, rest_seconds=0.002), str)
        shares = band([there / here for here, there in zip(own.seconds, read.seconds, strict=True)])
        seconds = band(own.seconds).median
        rate = cache.numel() * cache.element_size() / seconds / 1e9
        values = (batch, seqlen, head_dim, size, f"{1e6 * seconds:.1f}", f"{rate:.0f}", *(f"{x:.3f}" for x in shares))
        yield dict(zip(FIELDS, values, strict=True))


@click.command(help=__doc__)
@click.option("--as-arch", type=click.Choice(ARCHITECTURES), help="Compile Triton kernels for this older architecture.")
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file for all rows.")
@click.option("--rounds", default=7, show_default=True)
def main(as_arch: str | None, store: Path | None, rounds: int) -> None:
    if as_arch is not None:
        install(as_arch)
    rows = []
    for shape in SHAPES:
        for row in measured(*shape, rounds):
            rows.append(row)
            click.echo(", ".join(str(x) for x in row.values()))
    if store is not None:
        csv_rows.write(store, FIELDS, rows)


if __name__ == "__main__":
    main()
