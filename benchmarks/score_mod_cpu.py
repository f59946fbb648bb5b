"""Time a table of distances as a `score_mod` on a CPU, on one thread: `python benchmarks/score_mod_cpu.py`.

8 heads of 64 features, float32. Compared with the call without a function, and with `scaled_dot_product_attention` and
the biases of the table written out. Calls alternate; each figure is the median of the rounds, with the fastest.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flashtile

HEADS, HEAD_DIM, REACH = 8, 64, 8


def calls(seqlen: int) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """The implementations, and the tensors that get gradients."""
    q, k, v = (torch.randn(1, HEADS, seqlen, HEAD_DIM, requires_grad=True) for _ in range(3))
    table = torch.randn(HEADS, 2 * REACH + 1, requires_grad=True)
    mod = flashtile.score_mods.relative_table(table)
    distance = torch.arange(seqlen)[:, None] - torch.arange(seqlen)
    bias = table.detach()[None, :, distance.clamp(-REACH, REACH) + REACH]
    return {
        "without a function": (lambda: flashtile.attention(q, k, v, backend="cpu"), [q, k, v]),
        "score_mod": (lambda: flashtile.attention(q, k, v, score_mod=mod, backend="cpu"), [q, k, v, table]),
        "SDPA with the biases": (lambda: scaled_dot_product_attention(q, k, v, attn_mask=bias), [q, k, v]),
    }


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


@click.command()
@click.option("--seqlen", "seqlens", multiple=True, type=int, default=(1024, 2048), help="May be repeated.")
@click.option("--rounds", default=15)
def main(seqlens: tuple[int, ...], rounds: int) -> None:
    """Print the times of forward, and of forward and backward."""
    torch.set_num_threads(1)
    for seqlen in seqlens:
        made = calls(seqlen)
        for backward in (False, True):
            times: dict[str, list[float]] = {name: [] for name in made}
            for n in range(rounds + 1):
                for name, (call, leaves) in made.items():

                    def run(call: Any = call, leaves: Any = leaves, backward: bool = backward) -> None:
                        with torch.set_grad_enabled(backward):
                            out = call()
                        if backward:
                            torch.autograd.grad(out, leaves, torch.ones_like(out))

                    found = milliseconds(run)
                    times[name] += [found] if n > 0 else []
            for name, values in times.items():
                words = "forward and backward" if backward else "forward"
                click.echo(f"{seqlen} {words}, {name}: {statistics.median(values):.1f} ms (fastest {min(values):.1f})")


if __name__ == "__main__":
    main()
