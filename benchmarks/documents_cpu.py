"""A mask of documents beside the same call packed, on a CPU: `python benchmarks/documents_cpu.py`.

Random documents of 512 tokens on the mean, 4 heads. Calls take turns; each figure is the least of the rounds, in
milliseconds, as other programs may run on the machine.
"""

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
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def least(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    found = {name: float("inf") for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name] = min(found[name], milliseconds(run))
    return found


def compare(tokens: int, head_dim: int, dtype: torch.dtype, causal: bool, rounds: int) -> None:
    torch.manual_seed(0)
    cuts = (torch.randperm(tokens - 1)[: tokens // TOKENS_PER_DOCUMENT] + 1).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([tokens])]).int()
    longest = int(offsets.diff().max())
    mask = mask_mods.document(torch.bucketize(torch.arange(tokens), cuts, right=True))
    packed = [torch.randn(tokens, HEADS, head_dim, dtype=dtype) for _ in range(4)]
    dense = [x.transpose(0, 1)[None] for x in packed]
    (q, k, v), (packed_q, packed_k, packed_v) = (
        [x.detach().requires_grad_() for x in some[:3]] for some in (dense, packed)
    )

    def attend() -> torch.Tensor:
        return flashtile.attention(q, k, v, mask=mask, causal=causal)  # type: ignore[return-value]

    def attend_packed() -> torch.Tensor:
        return flashtile.attention_varlen(  # type: ignore[return-value]
            packed_q, packed_k, packed_v, cu_seqlens_q=offsets, cu_seqlens_k=offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, causal=causal,
        )  # fmt: skip

    out, out_packed = attend(), attend_packed()
    passes = {
        "forward": {"mask": attend, "packed": attend_packed},
        "backward": {
            "mask": lambda: torch.autograd.grad(out, (q, k, v), dense[3], retain_graph=True),
            "packed": lambda: torch.autograd.grad(
                out_packed, (packed_q, packed_k, packed_v), packed[3], retain_graph=True
            ),
        },
    }
    call = f"{tokens} tokens, head dimension {head_dim}, {dtype}{', causal' if causal else ''}"
    for name, runs in passes.items():
        found = least(runs, rounds)
        ratio = found["mask"] / found["packed"]
        print(f"{call}, {name}: mask {found['mask']:.1f}, packed {found['packed']:.1f}, ratio {ratio:.2f}")


@click.command(help=__doc__)
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=9, show_default=True)
def main(threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    for call in CALLS:
        compare(*call, rounds)


if __name__ == "__main__":
    main()
