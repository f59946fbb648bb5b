"""The cost of `batch_invariant=True` on a GPU, and whose bits change: `python benchmarks/batch_invariance.py`.

32 query and 8 key heads in bfloat16. Each call is captured in a CUDA graph, with it and without; both take turns. A
ratio is the time with it divided by the time without, a median over rounds. Then one sequence is decoded, and prefilled
in parts, among neighbors of random lengths: by this library with it and without, and by FlashAttention-3 where that is
installed.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

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
WIDTHS = (64, 128, 256)
PREFILL = ((1, 16384), (4, 4096), (32, 512))  # sequences and their tokens
DECODING = ((1, 8192), (1, 131072), (8, 8192), (8, 32768), (64, 1024), (64, 8192))  # sequences and their keys
FIELDS: tuple[str, ...] = ("call", "batch", "seqlen", "head_dim", "us", "us invariant", "ratio", "low", "high")
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]  # packed tensors, offsets, most queries


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], device="cuda", dtype=torch.int32)


def prefill(batch: int, tokens: int, width: int) -> Callable[[bool], Tensor]:
    q, (k, v) = randn(batch * tokens, HEADS, width), randn(2, batch * tokens, KV_HEADS, width)
    cu = offsets([tokens] * batch)
    most = {"max_seqlen_q": tokens, "max_seqlen_k": tokens}
    return lambda on: flashtile.attention_varlen(q, k, v, cu, cu, causal=True, batch_invariant=on, **most)  # type: ignore[arg-type]


def decoding(batch: int, keys: int, width: int) -> Callable[[bool], Tensor]:
    q, caches = randn(batch, HEADS, 1, width), randn(2, batch, KV_HEADS, keys, width)
    held = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    return lambda on: flashtile.attention_with_kvcache(
        q, *caches, cache_seqlens=held, causal=True, batch_invariant=on
    )  # fmt: skip


def measured(name: str, batch: int, length: int, width: int, rounds: int) -> dict[str, Any]:
    clock = clock_of(torch.device("cuda"))
    call = prefill(batch, length, width) if name == "prefill" else decoding(batch, length, width)
    entrants = [Entrant(f"{on}", clock.replayable([lambda on=on: call(on)])) for on in (False, True)]
    interleave(clock, entrants, Timing(rounds=rounds, sample_seconds=0.004, rest_seconds=0.001), str)
    without, with_it = entrants
    ratios = band([x / y for x, y in zip(with_it.seconds, without.seconds, strict=True)])
    seconds = (f"{1e6 * band(x.seconds).median:.1f}" for x in (without, with_it))
    values = (name, batch, length, width, *seconds, *(f"{n:.3f}" for n in ratios))
    return dict(zip(FIELDS, values, strict=True))


def own(invariant: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most: int) -> Tensor:
        return flashtile.attention_varlen(
            q, k, v, cu_q, cu_k, max_seqlen_q=most, causal=True, batch_invariant=invariant
        )  # fmt: skip

    return attend


def flash_attention_3(operators: Any) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most: int) -> Tensor:
        offsets = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
        longest = {"max_seqlen_q": most, "max_seqlen_k": int(cu_k.diff().max())}
        return operators.fwd(q, k, v, **offsets, **longest, is_causal=True, num_splits=0)[0]  # type: ignore[no-any-return]

    return attend


def changes(attend: Attend, rows: int, width: int = 128, keys: int = 3000, trials: int = 24) -> int:
    """Batches in which the last `rows` rows of one sequence have other bits than alone."""
    q, (k, v) = randn(rows, HEADS, width), randn(2, keys, KV_HEADS, width)
    alone = attend(q, k, v, offsets([rows]), offsets([keys]), rows)
    count = 0
    for _ in range(trials):
        others = torch.randint(1, 130, (int(torch.randint(1, 64, ())),)).tolist()
        queries = [1] * len(others) if rows == 1 else others
        many = torch.cat((randn(sum(queries), HEADS, width), q))
        many_k, many_v = (torch.cat((randn(sum(others), KV_HEADS, width), x)) for x in (k, v))
        cu_q, cu_k = offsets([*queries, rows]), offsets([*others, keys])
        out = attend(many, many_k, many_v, cu_q, cu_k, max(*queries, rows))
        count += not torch.equal(out[-rows:], alone)
    return count


@click.command(help=__doc__)
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="A CSV file for all rows.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--fa3-library", type=click.Path(path_type=Path), help="FlashAttention-3's library; else its package.")
@click.option("--costs/--no-costs", default=True, help="Measure times too.")
def main(store: Path | None, rounds: int, fa3_library: Path | None, costs: bool) -> None:
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for name, shapes in (("prefill", PREFILL), ("decoding", DECODING)) if costs else ():
        for width in WIDTHS:
            for batch, length in shapes:
                rows.append(measured(name, batch, length, width, rounds))
                click.echo(", ".join(str(x) for x in rows[-1].values()))
    attends = {"batch_invariant=True": own(True), "without it": own(False)}
    peer = FlashAttention3(fa3_library)
    if peer.unusable(torch.device("cuda")) is None:
        attends["FlashAttention-3"] = flash_attention_3(peer.operators())
    for name, attend in attends.items():
        found = ", ".join(f"{changes(attend, n)} of 24 batches with {n} rows" for n in (1, 40, 300))
        click.echo(f"other bits, {name}: {found}")
    if store is not None:
        csv_rows.write(store, FIELDS, rows)


if __name__ == "__main__":
    main()
