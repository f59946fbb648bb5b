"""Calls over pages of keys beside the same calls without pages: `python benchmarks/pages.py --store FILE.csv`.

Prefill in chunks and speculative decoding, bfloat16, causal, 32 query and 8 key heads, pages in random order. All calls
of a shape take turns; milliseconds are medians on the device, with quantiles of 20% and 80%. Paged results are compared
with those without pages first. `--fa3-library` adds FlashAttention-3.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import csv_rows
import torch
from torch import Tensor

import flashtile
from flashtile.bench.clocks import clock_of
from flashtile.bench.providers.flash_attn_3 import FlashAttention3
from flashtile.bench.rounds import Entrant, band, interleave
from flashtile.bench.sweep import Timing

HEADS, KV_HEADS = 32, 8
FEW_ROWS = 16  # up to which FlashAttention-3 chooses the number of splits
BOUND = 0.02  # of the largest difference, relative to the largest element
FIELDS = ("batch", "seqlen_q", "seqlen_k", "head_dim", "page_size", "library", "ms", "low", "high")


class Shape(NamedTuple):
    batch: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    page_sizes: tuple[int, ...]


SHAPES = (
    Shape(8, 1024, 8192, 128, (8, 16, 64, 128, 256)),
    Shape(2, 8192, 8192, 128, (16, 256)),
    Shape(1, 512, 4096, 128, (16, 64)),
    Shape(8, 1024, 8192, 64, (8, 16, 64, 128, 256)),
    Shape(1, 512, 4096, 64, (16, 64)),
    *(Shape(32, rows, 8192, 128, (8, 16, 64, 256)) for rows in (2, 4, 8, 16)),
)


class Inputs:
    """A call's tensors, `[B, S, H, D]`."""

    def __init__(self, shape: Shape):
        torch.manual_seed(0)
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        batch, seqlen_q, seqlen_k, head_dim, _ = shape
        self.q = torch.randn(batch, seqlen_q, HEADS, head_dim, **options)
        self.k, self.v = torch.randn(2, batch, seqlen_k, KV_HEADS, head_dim, **options)
        self.lengths = torch.full((batch,), seqlen_k, dtype=torch.int32, device="cuda")

    def pages(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Pages of keys and of values `[pages, size, H, D]`, and the table."""
        batch, seqlen = self.k.shape[:2]
        order = torch.randperm(batch * seqlen // size, device="cuda")
        pages = [torch.empty_like(x).view(-1, size, *x.shape[2:]) for x in (self.k, self.v)]
        for found, x in zip(pages, (self.k, self.v), strict=True):
            found[order] = x.view(found.shape)
        return *pages, order.view(batch, seqlen // size).int()


def calls_of(shape: Shape, inputs: Inputs, fa3: Callable[..., Any] | None) -> Iterator[tuple[int | None, str, Any]]:
    """Page size, library and function of each call; without pages first."""
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    splits = 0 if shape.seqlen_q <= FEW_ROWS else 1
    yield None, "flashtile", lambda: flashtile.attention(q, k, v, causal=True)
    if fa3 is not None:
        yield (
            None,
            "fa3",
            lambda: fa3(inputs.q, inputs.k, inputs.v, is_causal=True, num_splits=splits)[0].transpose(1, 2),
        )
    for size in shape.page_sizes:
        pages = inputs.pages(size)
        yield (
            size,
            "flashtile",
            lambda pages=pages: flashtile.attention_with_kvcache(
                q, *pages[:2], cache_seqlens=inputs.lengths, page_table=pages[2], causal=True
            ),
        )
        if fa3 is not None:
            yield (
                size,
                "fa3",
                lambda pages=pages: fa3(
                    inputs.q,
                    *pages[:2],
                    seqused_k=inputs.lengths,
                    page_table=pages[2],
                    is_causal=True,
                    num_splits=splits,
                )[0].transpose(1, 2),
            )


def measured(shape: Shape, fa3: Callable[..., Any] | None, rounds: int) -> list[dict[str, Any]]:
    """Rows of one shape."""
    inputs = Inputs(shape)
    calls = list(calls_of(shape, inputs, fa3))
    expected = calls[0][2]().float()
    entrants = []
    for size, library, run in calls:
        error = float((run().float() - expected).abs().max() / expected.abs().max())
        if error > BOUND:
            raise click.ClickException(f"{library}, pages of {size}: {error:.1e} of the largest element wrong")
        entrants.append(Entrant(f"{library} {size}", run))
    interleave(
        clock_of(torch.device("cuda")), entrants, Timing(rounds=rounds, sample_seconds=0.01, rest_seconds=0.002), str
    )
    rows = []
    for (size, library, _), entrant in zip(calls, entrants, strict=True):
        if entrant.failure is not None:
            raise click.ClickException(f"{entrant.name}: {entrant.failure}")
        milliseconds = band(entrant.seconds).map(lambda x: float(f"{1e3 * x:.5g}"))
        values = (*shape[:4], size or "", library, *milliseconds)
        rows.append(dict(zip(FIELDS, values, strict=True)))
    return rows


@click.command(help=__doc__)
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file for all rows.")
@click.option("--fa3-library", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--shape", "chosen", multiple=True, help="Batch x rows x keys x head dimension; may be repeated.  [default: all]"
)
@click.option("--rounds", default=7, show_default=True)
def main(store: Path | None, fa3_library: Path | None, chosen: tuple[str, ...], rounds: int) -> None:
    fa3 = None
    if fa3_library is not None:
        library = FlashAttention3(fa3_library)
        reason = library.unusable(torch.device("cuda"))
        if reason is not None:
            raise click.ClickException(reason)
        fa3 = library.operators().fwd
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        if chosen and " x ".join(map(str, shape[:4])) not in chosen:
            continue
        for row in measured(shape, fa3, rounds):
            rows.append(row)
            click.echo(", ".join(str(x) for x in row.values()))
        if store is not None:
            csv_rows.write(store, FIELDS, rows)


if __name__ == "__main__":
    main()
