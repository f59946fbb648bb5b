"""Decode steps as a server runs them: paged caches, `varlen_attn_out`, one CUDA graph: `python benchmarks/serving.py`.

Sequences of random lengths share one pool of pages, in random order. On a GPU one step, which is `varlen_attn_out` for
all layers, is captured once; between replays only the lengths, the page table, the new keys and the queries change, in
place. Each configuration is first compared with dense calls in float64 at two sets of lengths. `--device cpu` runs the
same without a graph.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import click
import torch
from torch import Tensor

import flashtile
from flashtile.compat.torch import varlen_attn_out


class Server(NamedTuple):
    """Tensors that stay where they are between steps.

    Attributes:
        q, out: `[B, Hq, D]`, one token of each sequence.
        k_pages, v_pages: `[num_pages, page_size, Hkv, D]`.
        block_table: int32 `[B, max_pages]`.
        lengths: int32 `[B]`, with the new token.
        offsets: int32 `[B + 1]`, 0, 1, 2, ...
    """

    q: Tensor
    out: Tensor
    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    lengths: Tensor
    offsets: Tensor


def new_server(batch: int, heads: tuple[int, int], longest: int, page_size: int, device: str) -> Server:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    own = -(-longest // page_size)
    pages = torch.randn(2, batch * own, page_size, heads[1], 128, device=device).to(dtype)
    table = torch.randperm(batch * own, device=device).int().view(batch, own)
    q = torch.randn(batch, heads[0], 128, device=device).to(dtype)
    lengths = torch.full((batch,), longest, dtype=torch.int32, device=device)
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return Server(q, torch.empty_like(q), pages[0], pages[1], table, lengths, offsets)


def attend(server: Server) -> None:
    """One layer of one step; it reads nothing back, so a graph can hold it."""
    longest = server.block_table.shape[1] * server.k_pages.shape[1]
    varlen_attn_out(
        server.out,
        server.q,
        server.k_pages,
        server.v_pages,
        server.offsets,
        None,
        1,
        longest,
        enable_gqa=True,
        seqused_k=server.lengths,
        block_table=server.block_table,
    )


def difference(server: Server) -> float:
    """The largest difference of `server.out` from dense calls in float64."""
    worst = 0.0
    for b, n in enumerate(server.lengths.tolist()):
        k, v = (x[server.block_table[b].long()].flatten(0, 1)[:n].double() for x in (server.k_pages, server.v_pages))
        q, k, v = (x.transpose(0, 1)[None] for x in (server.q[b : b + 1].double(), k, v))
        expected = flashtile.attention(q, k, v, backend="reference")[0, :, 0]
        worst = max(worst, float((server.out[b] - expected).abs().max()))
    return worst


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a replayed CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def change(server: Server, shortest: int) -> None:
    """Other lengths and pages, as after sequences have ended and others have begun."""
    longest = server.block_table.shape[1] * server.k_pages.shape[1]
    server.lengths.copy_(torch.randint(shortest, longest + 1, server.lengths.shape))
    server.block_table.copy_(
        server.block_table.flatten()[torch.randperm(server.block_table.numel())].view_as(server.block_table)
    )


def milliseconds(step: Callable[[], None], device: str, rounds: int) -> float:
    """The median time of a step."""
    times = []
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@click.command(context_settings={"show_default": True})
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda")
@click.option("--batch", "batches", type=int, multiple=True, default=(1, 16, 64))
@click.option("--longest", type=click.IntRange(16), default=4096)
@click.option("--page-size", "page_sizes", type=int, multiple=True, default=(16, 128))
@click.option("--heads", type=(int, int), default=(32, 8))
@click.option("--layers", type=click.IntRange(1), default=16)
@click.option("--rounds", type=click.IntRange(1), default=20)
@torch.no_grad()
def main(
    device: str,
    batches: tuple[int, ...],
    longest: int,
    page_sizes: tuple[int, ...],
    heads: tuple[int, int],
    layers: int,
    rounds: int,
) -> None:
    """Compare and time one decode step; exit with 1 if a result is wrong."""
    torch.manual_seed(0)
    wrong = False
    for batch in batches:
        for page_size in page_sizes:
            server = new_server(batch, heads, longest, page_size, device)

            def step(server: Server = server) -> None:
                for _ in range(layers):
                    attend(server)

            replay = captured(step) if device == "cuda" else step
            worst = 0.0
            for shortest in (1, longest // 2):
                change(server, shortest)
                server.out.zero_()
                replay()
                worst = max(worst, difference(server))
            wrong |= worst > (2e-2 if device == "cuda" else 1e-4)
            read = layers * 2 * int(server.lengths.sum()) * heads[1] * 128 * server.q.element_size()
            eager, graph = milliseconds(step, device, rounds), milliseconds(replay, device, rounds)
            words = (
                f"graph {graph:.3f} ms ({read / graph / 1e6:.0f} GB/s of keys and values), " if device == "cuda" else ""
            )
            click.echo(
                f"{batch} sequences, pages of {page_size}, {layers} layers: {words}eager {eager:.3f} ms; "
                f"largest difference {worst:.1e}"
            )
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()
