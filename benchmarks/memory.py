"""Peak memory of attention beyond its inputs and results, in a fresh process for each row.

    python benchmarks/memory.py                    # B=1, H=8, S=16384, D=64, float32, on the CPU
    python benchmarks/memory.py --device cuda --what forward backward jvp double_backward

`forward` counts the most that the call has allocated at a time, less its results (out and lse); `backward` less the
three gradients; `jvp` less out and its tangent; `double_backward` (a Hessian-vector product by reverse over reverse)
less three gradients. Bytes are those of torch's allocators: on a CPU from the profiler's allocation events, on a GPU
from the allocator's own peak. Both are exact and repeat.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable

import torch
from torch import Tensor

from flashtile.bench.allocation import live_and_peak_bytes

Results = tuple[Tensor, ...]


def task(what: str, arguments: argparse.Namespace, causal: bool) -> Callable[[], Results]:
    """What is measured, with everything before it already done."""
    from flashtile import attention

    shape = (1, arguments.heads, arguments.seqlen, arguments.head_dim)
    inputs = [torch.randn(shape, device=arguments.device, requires_grad=True) for _ in range(3)]
    others = [torch.randn_like(x) for x in inputs]

    def call(*qkv: Tensor, **keywords: bool) -> Tensor:
        return attention(*qkv, causal=causal, backend=arguments.backend, **keywords)  # type: ignore[return-value]

    if what == "forward":
        return lambda: call(*inputs, return_lse=True)  # type: ignore[return-value]
    if what == "jvp":
        detached = tuple(x.detach() for x in inputs)
        return lambda: torch.func.jvp(call, detached, tuple(others))  # type: ignore[return-value]
    out = call(*inputs)
    if what == "backward":
        return lambda: torch.autograd.grad(out, inputs, others[0], retain_graph=True)
    gradients = torch.autograd.grad(out, inputs, others[0], create_graph=True)
    return lambda: torch.autograd.grad(gradients, inputs, others, retain_graph=True)


def measure(what: str, arguments: argparse.Namespace, causal: bool, results: "multiprocessing.Queue[float]") -> None:
    run = task(what, arguments, causal)
    kept: list[tuple[Tensor, ...]] = []
    _, peak = live_and_peak_bytes(lambda: kept.append(run()), torch.device(arguments.device))
    results.put((peak - sum(x.numel() * x.element_size() for x in kept[0])) / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--backend", default="tiled")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--what", nargs="+", default=["forward", "backward"])
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for what in arguments.what:
        for causal in (False, True):
            results: multiprocessing.Queue[float] = context.Queue()
            process = context.Process(target=measure, args=(what, arguments, causal, results))
            process.start()
            mib = results.get(timeout=1800)
            process.join()
            row = vars(arguments) | {"what": what, "causal": causal, "mib": round(mib, 1), "torch": torch.__version__}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
