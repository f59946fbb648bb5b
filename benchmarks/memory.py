"""Peak memory of attention beyond its inputs and outputs, in a fresh process for each row.

    python benchmarks/memory.py            # the contract's case: B=1, H=8, S=16384, D=64, float32, on the CPU
    python benchmarks/memory.py --seqlen 8192 --backend reference

Forward counts what the call allocates at its peak above q, k, v and out (with lse). Backward counts above those, dout
and the three gradients. Bytes come from torch's own allocation events, so that the figure is exact and repeats.
"""

import argparse
import json
import multiprocessing
import sys

import torch


class LiveBytes:
    """Peak bytes that torch's CPU allocator hands out while the profiler watches."""

    def __enter__(self) -> "LiveBytes":
        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profiler.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self.profiler.__exit__(*details)
        live = self.peak = 0
        events = self.profiler.profiler.kineto_results.events()
        for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            live += event.nbytes()
            self.peak = max(self.peak, live)


def size(*tensors: torch.Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def measure(arguments: argparse.Namespace, causal: bool) -> dict[str, float]:
    from flashtile import attention

    torch.set_num_threads(2)
    shape = (1, arguments.heads, arguments.seqlen, arguments.head_dim)
    q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
    with LiveBytes() as forward:
        out, lse = attention(q, k, v, causal=causal, backend=arguments.backend, return_lse=True)
    dout = torch.randn_like(out)
    with LiveBytes() as backward:
        gradients = torch.autograd.grad(out, (q, k, v), dout)
    return {
        "causal": causal,
        "forward_mib": (forward.peak - size(out, lse)) / 2**20,
        "backward_mib": (backward.peak - size(*gradients)) / 2**20,
    }


def run(arguments: argparse.Namespace, causal: bool, results: "multiprocessing.Queue") -> None:
    results.put(measure(arguments, causal))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--backend", default="tiled")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    for causal in (False, True):
        process = context.Process(target=run, args=(arguments, causal, results))
        process.start()
        row = results.get()
        process.join()
        print(json.dumps({"torch": torch.__version__, **vars(arguments), **row}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
