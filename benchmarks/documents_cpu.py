"""A mask of documents beside the same call packed, on a CPU: `python benchmarks/documents_cpu.py`.

Random documents of 512 tokens on the mean, 4 heads, which are inside positions as in the packed call, or contiguous.
Calls take turns; times are of the processor in milliseconds, as other programs may run on the machine: the least of the
rounds, and the median of the rounds' ratios.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch

import flashtile
from flashtile import mask_mods

HEADS, TOKENS_PER_DOCUMENT = 4, 512
CALLS = (
    (4096, 64, torch.float32, False),
    (4096, 64, torch.float32, True),
    (4096, 128, torch.float32, False),
    (8192, 64, torch.float32, False),
    (4096, 64, torch.bfloat16, False),
)


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e3


def measured(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(milliseconds(run))
    return found


def compare(tokens: int, head_dim: int, dtype: torch.dtype, causal: bool, rounds: int) -> None:
    torch.manual_seed(0)
    cuts = (torch.randperm(tokens - 1)[: tokens // TOKENS_PER_DOCUMENT] + 1).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).int()
    longest = int(offsets.diff().max())
    mask = mask_mods.document(torch.bucketize(torch.arange(tokens), cuts, right=True))
    packed = [torch.randn(tokens, HEADS, head_dim, dtype=dtype) for _ in range(4)]
    inside = [x.transpose(0, 1)[None] for x in packed]
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": longest, "max_seqlen_k": longest}
    forward, backward = {}, {}
    for name, tensors in {"packed": packed, "inside": inside, "contiguous": [x.contiguous() for x in inside]}.items():
        *inputs, dout = tensors
        leaves = [x.detach().requires_grad_() for x in inputs]
        function, given = (
            (flashtile.attention_varlen, lengths) if name == "packed" else (flashtile.attention, {"mask": mask})
        )
        forward[name] = attend = functools.partial(function, *leaves, causal=causal, **given)
        backward[name] = functools.partial(torch.autograd.grad, attend(), leaves, dout, retain_graph=True)
    call = f"{tokens} tokens, head dimension {head_dim}, {dtype}{', causal' if causal else ''}"
    for kind, runs in (("forward", forward), ("backward", backward)):
        found = measured(runs, rounds)
        words = [f"packed {min(found['packed']):.1f}"]
        for name in ("inside", "contiguous"):
            ratio = statistics.median(x / y for x, y in zip(found[name], found["packed"], strict=True))
            words.append(f"heads {name} {min(found[name]):.1f}, ratio {ratio:.2f}")
        print(f"{call}, {kind}: {'; '.join(words)}", flush=True)


@click.command(help=__doc__)
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    for call in CALLS:
        compare(*call, rounds)


if __name__ == "__main__":
    main()
