"""Decoding over a cache of 8 bits beside one in bfloat16: `python benchmarks/eight_bit_caches.py --store FILE.csv`.

One query a sequence, 32 query and 8 key heads. Each call is captured in a CUDA graph; calls of one shape take turns. A
ratio is the call's time divided by bfloat16's, a median over rounds. A read is a sum by PyTorch over the bytes of the
cache. The default shapes take at most a minute on an H100.

With `--forms`, calls of 8 bits run in several forms, tiles and ways to read numbers, over fewer shapes and kinds: the
quickest one belongs into `plan.few_rows.tile_of`. Kernels are compiled first, two to three seconds each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import csv_rows
import torch
from torch import Tensor

import flashtile
from flashtile.as_arch import ARCHITECTURES, install
from flashtile.backend.triton.launch import eight_bit
from flashtile.backend.triton.plan import few_rows
from flashtile.backend.triton.tile_config import KernelConfig
from flashtile.bench.clocks import clock_of
from flashtile.bench.rounds import Entrant, band, interleave
from flashtile.bench.sweep import Timing
from flashtile.dispatch import fast_path

HEADS, KV_HEADS = 32, 8
BATCHES, WIDTHS, KEYS = (8, 64), (128, 256), (1024, 4096, 8192, 32768, 131072)
MOST_BYTES = 24 * 2**30  # of a cache in bfloat16
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
KINDS = ((E4M3, "head"), (E4M3, "token"), (E5M2, "token"), (INT8, "token"))
FORM_KINDS, FORM_SHAPES = ((E4M3, "token"), (INT8, "token")), ((8, 1024), (8, 32768), (64, 8192))


class Form(NamedTuple):
    """A way to run calls of 8 bits; of a tile that is `None`, the planned one."""

    name: str = ""
    words: bool = True  # two features are read at a time
    tile: KernelConfig | None = None


SHIPPED = Form()
FORMS = {
    128: (
        Form("bytes", words=False), SHIPPED, Form("4 stages", tile=KernelConfig(8, 64, 4, 4)),
        Form("2 warps", tile=KernelConfig(8, 32, 2, 4)), Form("2 warps, 64 keys", tile=KernelConfig(8, 64, 2, 3)),
        Form("128 keys", tile=KernelConfig(8, 128, 4, 3)),
    ),
    256: (
        Form("bytes", words=False), SHIPPED, Form("4 stages", tile=KernelConfig(8, 32, 4, 4)),
        Form("2 warps", tile=KernelConfig(8, 32, 2, 3)), Form("64 keys", tile=KernelConfig(8, 64, 4, 3)),
    ),
}  # fmt: skip
FIELDS: tuple[str, ...] = ("batch", "seqlen_k", "head_dim", "cache", "us", "GB/s", "ratio", "low", "high")


def call_of(q: Tensor, cache: Tensor, descale: Tensor | None) -> Callable[[], Tensor]:
    lengths = torch.full((len(q),), cache.shape[3], dtype=torch.int32, device="cuda")
    scales: dict[str, Any] = {} if descale is None else {"k_descale": descale, "v_descale": descale}
    return lambda: flashtile.attention_with_kvcache(q, *cache, cache_seqlens=lengths, causal=True, **scales)


@contextmanager
def planned_as(form: Form) -> Iterator[None]:
    """Calls are planned, and captured, in this form."""
    tile = few_rows.tile_of if form.tile is None else lambda *_: form.tile
    words = eight_bit.in_pairs if form.words else lambda *_: False
    fast_path.forget()
    with mock.patch.object(few_rows, "tile_of", tile), mock.patch.object(eight_bit, "in_pairs", words):
        yield
    fast_path.forget()


def measured(batch: int, keys: int, width: int, rounds: int, forms: tuple[Form, ...]) -> list[dict[str, Any]]:
    """Rows of one shape. Numbers are random bytes: time does not depend on them, but for NaN, which none are."""
    clock, shape = clock_of(torch.device("cuda")), (2, batch, KV_HEADS, keys, width)
    q = torch.randn(batch, HEADS, 1, width, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    small = torch.randint(0, 100, shape, device="cuda", dtype=torch.uint8)
    calls = {"bfloat16": (call_of(q, wide, None), wide.nbytes, SHIPPED)}
    calls["read of 8 bits"] = small.view(torch.float32).sum, small.nbytes, SHIPPED
    of_head = torch.full((KV_HEADS,), 0.01, device="cuda")
    of_token = torch.full((batch, KV_HEADS, keys), 0.01, device="cuda")
    for dtype, kind in KINDS if forms == (SHIPPED,) else FORM_KINDS:
        descale = of_head if kind == "head" else of_token
        moved = small.nbytes + (2 * of_token.nbytes if kind == "token" else 0)
        name = f"{str(dtype).removeprefix('torch.')} by {kind}"
        for form in forms:
            calls[f"{name} {form.name}".strip()] = call_of(q, small.view(dtype), descale), moved, form
    entrants = []
    for name, (run, _, form) in calls.items():
        with planned_as(form):
            entrants.append(Entrant(name, clock.replayable([run])))
    interleave(clock, entrants, Timing(rounds=rounds, sample_seconds=0.004, rest_seconds=0.001), str)
    rows = []
    for x in entrants:
        ratios = band([own / there for own, there in zip(x.seconds, entrants[0].seconds, strict=True)])
        seconds = band(x.seconds).median
        rate = calls[x.name][1] / seconds / 1e9
        values = (batch, keys, width, x.name, f"{1e6 * seconds:.1f}", f"{rate:.0f}", *(f"{n:.3f}" for n in ratios))
        rows.append(dict(zip(FIELDS, values, strict=True)))
    return rows


@click.command(help=__doc__)
@click.option("--as-arch", type=click.Choice(ARCHITECTURES), help="Compile Triton kernels for this older architecture.")
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file for all rows.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--head-dim", "widths", multiple=True, type=int, default=WIDTHS, show_default=True)
@click.option("--forms", is_flag=True, help="Several forms of the kernels of 8 bits.")
def main(as_arch: str | None, store: Path | None, rounds: int, widths: tuple[int, ...], forms: bool) -> None:
    if as_arch is not None:
        install(as_arch)
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    shapes = FORM_SHAPES if forms else tuple((batch, keys) for batch in BATCHES for keys in KEYS)
    for width in widths:
        for batch, keys in shapes:
            if 4 * batch * KV_HEADS * keys * width > MOST_BYTES:
                continue
            found = measured(batch, keys, width, rounds, FORMS[width] if forms else (SHIPPED,))
            rows += found
            for row in found:
                click.echo(", ".join(str(x) for x in row.values()))
    if store is not None:
        csv_rows.write(store, FIELDS, rows)


if __name__ == "__main__":
    main()
