"""Times of a document mask as a function, as packed sequences and as a bool tensor, on one thread of a CPU.

`python benchmarks/blocks_cpu.py`. The calls of a cell alternate; a figure is the median of 9. Documents have random
lengths.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashtile

HEADS, HEAD_DIM, REPEATS = 4, 64, 9
CELLS = ((2048, 8), (8192, 8), (8192, 32))  # tokens, documents


def offsets(seqlen: int, documents: int) -> Tensor:
    """Offsets of documents of random lengths, int32 `[documents + 1]`."""
    generator = torch.Generator().manual_seed(1)
    cuts = torch.randperm(seqlen - 1, generator=generator)[: documents - 1] + 1
    return torch.cat([torch.tensor([0]), cuts.sort()[0], torch.tensor([seqlen])]).int()


def calls(seqlen: int, documents: int) -> dict[str, Callable[[], Any]]:
    """Forward and backward of each way to say the same."""
    q, k, v, dout = (torch.randn(1, HEADS, seqlen, HEAD_DIM) for _ in range(4))
    cu_seqlens = offsets(seqlen, documents)
    lengths = cu_seqlens.diff()
    ids = torch.repeat_interleave(torch.arange(documents), lengths.long())
    longest = int(lengths.max())
    masks = {"mask": flashtile.mask_mods.document(ids), "bool": (ids[:, None] == ids)[None, None], "none": None}
    found: dict[str, Callable[[], Any]] = {}

    def add(name: str, attend: Callable[..., Tensor], inputs: list[Tensor], dout: Tensor) -> None:
        leaves = [x.requires_grad_() for x in inputs]
        out = attend(*leaves)
        found[f"{name} forward"] = lambda: attend(*(x.detach() for x in leaves))
        found[f"{name} backward"] = lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

    for name, mask in masks.items():
        add(name, lambda q, k, v, mask=mask: flashtile.attention(q, k, v, mask=mask, backend="cpu"), [q, k, v], dout)
    packed = [x.detach()[0].transpose(0, 1).contiguous() for x in (q, k, v, dout)]

    def varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes: dict[str, Any] = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return flashtile.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, **sizes, backend="cpu")

    add("packed", varlen, packed[:3], packed[3])
    return found


def main() -> None:
    torch.set_num_threads(1)
    for seqlen, documents in CELLS:
        timed = calls(seqlen, documents)
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(REPEATS):
            for name, call in timed.items():
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
        medians = {name: 1e3 * statistics.median(x) for name, x in seconds.items()}
        for direction in ("forward", "backward"):
            words = ", ".join(
                f"{name} {medians[f'{name} {direction}']:.3g}" for name in ("mask", "packed", "bool", "none")
            )
            print(f"{seqlen} tokens, {documents} documents, {direction}, ms: {words}")


if __name__ == "__main__":
    main()
