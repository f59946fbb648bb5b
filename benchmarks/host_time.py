"""How long the host is busy with one small call on a GPU: `python benchmarks/host_time.py`.

The device's time does not count: calls are queued back to back, and only the queueing is timed.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashtile

CALLS = 400


def microseconds(run: Callable[[], Any]) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return round(seconds / CALLS * 1e6, 1)


def dense(seqlen: int) -> None:
    """`[1, 8, seqlen, 64]`: up to 64 rows are decoded by Triton's kernels, 128 are Hopper's on a Hopper GPU."""
    q, k, v, dout = (torch.randn(1, 8, seqlen, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    attends = {"attention": flashtile.attention, "scaled_dot_product_attention": scaled_dot_product_attention}
    for name, attend in attends.items():
        with torch.no_grad():
            print(f"{name}, {seqlen} rows", microseconds(lambda: attend(q, k, v)))  # noqa: B023
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for name, attend in attends.items():
        out = attend(*leaves)
        print(f"{name}, {seqlen} rows, with gradients", microseconds(lambda: attend(*leaves)))  # noqa: B023
        backward = microseconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))  # noqa: B023
        print(f"{name}, {seqlen} rows, backward", backward)


def decoding() -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    cache, new = torch.randn(4, 8, 512, 64, **options), torch.randn(4, 8, 1, 64, **options)
    lengths = torch.full((4,), 100, dtype=torch.int32, device="cuda")

    def step(**appended: torch.Tensor) -> torch.Tensor:
        return flashtile.attention_with_kvcache(new, cache, cache, cache_seqlens=lengths, **appended)

    with torch.no_grad():
        print("attention_with_kvcache", microseconds(step))
        print("attention_with_kvcache, appending", microseconds(lambda: step(k=new, v=new)))


def main() -> None:
    for seqlen in (64, 128):
        dense(seqlen)
    decoding()


if __name__ == "__main__":
    main()
