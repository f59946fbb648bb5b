"""How long the host is busy with one small call on a GPU: `python benchmarks/host_time.py`.

The device's time does not count: calls are queued back to back, and only the queueing is timed. Calls to compare take
turns; each figure is the median of the rounds, with the fastest and the slowest.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import flashtile

ROUNDS, CALLS, WARM = 11, 100, 20


def microseconds(run: Callable[[], Any], calls: int) -> float:
    """Time of one call."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds / calls * 1e6


def compare(what: str, runs: dict[str, Callable[[], Any]]) -> None:
    for run in runs.values():
        microseconds(run, WARM)
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            found[name].append(microseconds(run, CALLS))
    for name, times in found.items():
        print(f"{what}, {name}: {statistics.median(times):.1f} us ({min(times):.1f} to {max(times):.1f})")


class Nothing(torch.autograd.Function):
    """Results and gradients that nothing is written to: the least that attention as a Python function takes."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def dense(seqlen: int) -> None:
    """`[1, 8, seqlen, 64]`: up to 64 rows are decoded by Triton's kernels, 128 are Hopper's on a Hopper GPU."""
    q, k, v, dout = (torch.randn(1, 8, seqlen, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    attends = {"attention": flashtile.attention, "scaled_dot_product_attention": scaled_dot_product_attention}
    attends["nothing"] = Nothing.apply  # type: ignore[assignment]

    def forward(attend: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        return lambda: attend(q, k, v)

    def backward(attend: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        out = attend(q, k, v)
        return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

    def measure(what: str, kind: Callable[..., Callable[[], Any]]) -> None:
        compare(f"{what}, {seqlen} rows", {name: kind(attend) for name, attend in attends.items()})

    with torch.no_grad():
        measure("forward", forward)
    for x in (q, k, v):
        x.requires_grad_()
    measure("forward with gradients", forward)
    measure("backward", backward)


def decoding() -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    caches, new = torch.randn(2, 4, 8, 512, 64, **options), torch.randn(4, 8, 1, 64, **options)
    lengths = torch.full((4,), 100, dtype=torch.int32, device="cuda")

    def step(**appended: torch.Tensor) -> torch.Tensor:
        return flashtile.attention_with_kvcache(new, *caches, cache_seqlens=lengths, **appended)

    with torch.no_grad():
        compare("attention_with_kvcache", {"reading": step, "appending": lambda: step(k=new, v=new)})


def growing() -> None:
    """One row attends over a dense cache that is one key longer at each call, and over one that is not."""
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    q, cache = torch.randn(1, 8, 1, 64, **options), torch.randn(1, 8, 8192, 64, **options)
    lengths = itertools.count(1)

    def longer() -> torch.Tensor:
        k = cache[:, :, : next(lengths)]
        return flashtile.attention(q, k, k)

    def repeated() -> torch.Tensor:
        k = cache[:, :, :500]
        return flashtile.attention(q, k, k)

    with torch.no_grad():
        compare("attention of one row", {"repeated": repeated, "growing": longer})


def default_device() -> None:
    q = torch.randn(1, 8, 128, 64, device="cuda", dtype=torch.bfloat16)

    def inside() -> torch.Tensor:
        with torch.device("cuda"):
            return flashtile.attention(q, q, q)

    def mode_alone() -> None:
        with torch.device("cuda"):
            pass

    with torch.no_grad():
        runs = {"without": lambda: flashtile.attention(q, q, q), "with": inside, "the mode alone": mode_alone}
        compare("attention and a default device", runs)


def functions(heads: int, seqlen: int) -> None:
    """`[1, heads, seqlen, 64]` with functions of pairs; a mask function of 2**24 pairs has lists of blocks."""
    q = torch.randn(1, heads, seqlen, 64, device="cuda", dtype=torch.bfloat16)
    mask = flashtile.mask_mods.document(torch.arange(seqlen, device="cuda") // 100)
    score_mod = flashtile.score_mods.alibi(torch.rand(heads, device="cuda"))
    with torch.no_grad():
        runs = {
            "no function": lambda: flashtile.attention(q, q, q),
            "a mask function": lambda: flashtile.attention(q, q, q, mask=mask),
            "a score_mod": lambda: flashtile.attention(q, q, q, score_mod=score_mod),
        }
        compare(f"functions, {heads} heads of {seqlen} rows", runs)


def main() -> None:
    for seqlen in (64, 128):
        dense(seqlen)
    decoding()
    growing()
    default_device()
    functions(8, 128)
    functions(16, 1024)


if __name__ == "__main__":
    main()
