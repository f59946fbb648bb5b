"""Decoding over a cache of latent rows: `python benchmarks/latent_caches.py --store FILE.csv`.

Rows have 576 features, the first 512 of them values; pages of 64 rows, in bfloat16, in 8 bits and in 656 bytes.
With 128 heads arithmetic binds, and with 16 memory: a read is a sum by PyTorch over the bytes of the cache. "triton"
and "hopper" are the bfloat16 call by one backend, "in triton" and "in hopper" the calls of 8 bits. Each call is
captured in a CUDA graph; calls of one shape take turns. A ratio is the call's time divided by its time over a cache in
bfloat16, a median over rounds. "own values" is the call with a copy of the values, which has no kernel for rows.
FlashInfer takes part if it is installed. All shapes take at most three minutes on an H100.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import csv_rows
import torch
from torch import Tensor

import flashtile
from flashtile.as_arch import ARCHITECTURES, install
from flashtile.bench.clocks import clock_of
from flashtile.bench.rounds import Entrant, band, interleave
from flashtile.bench.sweep import Timing

D, DV, PAGE = 576, 512, 64
SCALE = 192**-0.5
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
PACKED_AT_ONCE = 512  # pages
FIELDS: tuple[str, ...] = (
    "batch", "heads", "queries", "keys", "call", "us", "TFLOP/s", "GB/s", "ratio", "low", "high",
)  # fmt: skip


class Shape(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    own_values: bool = (
        False  # whether the call with a copy of the values takes part: it may take a hundred times as long
    )

    @property
    def operations(self) -> int:
        return 2 * self.batch * self.heads * self.queries * self.keys * (D + DV)


SHAPES = (
    Shape(128, 128, 1, 4096),
    Shape(128, 128, 2, 4096),
    Shape(128, 128, 1, 8192),
    Shape(128, 128, 2, 8192),
    Shape(128, 32, 1, 4096),
    Shape(128, 16, 1, 4096),
    Shape(128, 16, 1, 8192),
    Shape(64, 16, 1, 8192),
    Shape(32, 16, 1, 8192),
    Shape(8, 16, 1, 4096, own_values=True),
    Shape(1, 16, 1, 131072),
    Shape(1, 128, 1, 32768),
)
MATRIX, READ = "bfloat16", "read"


class Cache(NamedTuple):
    """Pages of rows and their table."""

    q: Tensor
    rows: Tensor  # bfloat16 [num_pages, PAGE, 1, D]
    table: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, shape: Shape) -> "Cache":
        b, columns = shape.batch, shape.keys // PAGE
        table = torch.randperm(b * columns, device="cuda").view(b, columns).int()
        rows = torch.randn(b * columns, PAGE, 1, D, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(b, shape.heads, shape.queries, D, device="cuda", dtype=torch.bfloat16)
        return cls(q, rows, table, torch.full((b,), shape.keys, dtype=torch.int32, device="cuda"))

    def call(self, rows: Tensor, v: Tensor | None = None, **more: Any) -> Callable[[], Any]:
        v_dim = DV if v is None else None
        return lambda: flashtile.attention_with_kvcache(
            self.q, rows, v, v_dim=v_dim, cache_seqlens=self.lengths, page_table=self.table, causal=True, scale=SCALE,
            **more,
        )  # fmt: skip

    def small(self, dtype: torch.dtype) -> Tensor:
        """Random bytes as rows: time does not depend on them, but for NaN, which none are."""
        return torch.randint(0, 100, self.rows.shape, device="cuda", dtype=torch.uint8).view(dtype)

    def packed(self) -> Tensor:
        """Rows of 656 bytes, whose scales are numbers."""
        rows, _ = flashtile.pack_latent_rows(self.rows[:PACKED_AT_ONCE])
        return rows.repeat(-(-len(self.rows) // len(rows)), 1, 1, 1)[: len(self.rows)]


def flashinfer_call(cache: Cache) -> Callable[[], Any] | None:
    try:
        mla: Any = importlib.import_module("flashinfer.mla")
    except ImportError:
        return None
    (batch, heads, queries, _), columns = cache.q.shape, cache.table.shape[1]
    wrapper = mla.BatchMLAPagedAttentionWrapper(torch.empty(2**27, dtype=torch.int8, device="cuda"))
    steps = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    dtype = cache.rows.dtype
    wrapper.plan(
        steps * queries, steps * columns, cache.table.flatten(), cache.lengths, heads, DV, D - DV, PAGE, True, SCALE,
        dtype, dtype,
    )  # fmt: skip
    q = cache.q.transpose(1, 2).flatten(0, 1)
    q_nope, q_pe = (x.contiguous() for x in q.split((DV, D - DV), -1))
    parts = [x.contiguous() for x in cache.rows[:, :, 0].split((DV, D - DV), -1)]
    return lambda: wrapper.run(q_nope, q_pe, *parts)


Calls = dict[str, tuple[Callable[[], Any], int]]  # by name, with the bytes that each reads


def calls_of(shape: Shape, cache: Cache, backends: Sequence[str]) -> Calls:
    rows, whole = cache.rows, cache.rows.nbytes
    calls: Calls = {MATRIX: (cache.call(rows), whole)}
    calls |= {name: (cache.call(rows, backend=name), whole) for name in backends}
    calls[READ] = rows.view(torch.float32).sum, whole
    of_token = torch.full((*rows.shape[:2], 1), 0.01, device="cuda")
    for dtype in (E4M3, INT8):
        name, small = str(dtype).removeprefix("torch."), cache.small(dtype)
        for backend in ("auto", *backends):
            by_head = cache.call(small, k_descale=of_token[0, 0], backend=backend)
            calls[f"{name} by head{of(backend)}"] = by_head, whole // 2
        calls[f"{name} by token"] = cache.call(small, k_descale=of_token), whole // 2 + of_token.nbytes
    packed = cache.packed()
    for backend in ("auto", *backends):
        calls[f"656 bytes{of(backend)}"] = cache.call(packed, backend=backend), packed.nbytes
    if shape.own_values:
        calls["own values"] = cache.call(rows, rows[..., :DV].contiguous()), whole + whole * DV // D
    if (other := flashinfer_call(cache)) is not None:
        calls["flashinfer"] = other, whole
    return calls


def of(backend: str) -> str:
    return "" if backend == "auto" else f" in {backend}"


def measured(shape: Shape, rounds: int, backends: Sequence[str]) -> list[dict[str, Any]]:
    clock = clock_of(torch.device("cuda"))
    calls = calls_of(shape, Cache.of(shape), backends)
    entrants = [Entrant(name, clock.replayable([run])) for name, (run, _) in calls.items()]
    interleave(clock, entrants, Timing(rounds=rounds, sample_seconds=0.004, rest_seconds=0.001), str)
    found = []
    for x in entrants:
        ratios = band([own / there for own, there in zip(x.seconds, entrants[0].seconds, strict=True)])
        seconds = band(x.seconds).median
        rates = 0 if x.name == READ else shape.operations / seconds / 1e12, calls[x.name][1] / seconds / 1e9
        values = (
            *shape[:4],
            x.name,
            f"{1e6 * seconds:.1f}",
            *(f"{n:.0f}" for n in rates),
            *(f"{n:.3f}" for n in ratios),
        )
        found.append(dict(zip(FIELDS, values, strict=True)))
    return found


@click.command(help=__doc__)
@click.option("--as-arch", type=click.Choice(ARCHITECTURES), help="Compile Triton kernels for this older architecture.")
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file for all rows.")
@click.option("--rounds", default=5, show_default=True)
def main(as_arch: str | None, store: Path | None, rounds: int) -> None:
    if as_arch is not None:
        install(as_arch)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        found = measured(shape, rounds, ("triton",) if as_arch else ("triton", "hopper"))
        rows += found
        for row in found:
            click.echo(", ".join(str(x) for x in row.values()))
    if store is not None:
        csv_rows.write(store, FIELDS, rows)


if __name__ == "__main__":
    main()
