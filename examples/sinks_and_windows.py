"""Stream without end: a window of keys alone loses its softmax's anchor, a learned sink for each head gives it back.

gpt-oss alternates layers like these. A sink is a score without a value: it takes weight from keys that do not matter,
so that a head can say "nothing here". Time and memory follow the window, not the length.
"""

import time

import torch

import flashtile

torch.manual_seed(0)
sinks = torch.zeros(8, requires_grad=True)  # one for each query head
for length in (1024, 2048, 4096):
    q = torch.randn(1, 8, length, 64)
    k, v = (torch.randn(1, 2, length, 64) for _ in range(2))  # query heads share two key heads
    for window in ((127, 0), (-1, 0)):
        flashtile.attention(q, k, v, window=window, sinks=sinks)  # the first call of a kind may compile
        start = time.perf_counter()
        out = flashtile.attention(q, k, v, window=window, sinks=sinks)
        print(f"{length} tokens, window {window}: {1e3 * (time.perf_counter() - start):.1f} ms")
out.square().mean().backward()
assert sinks.grad is not None
print(f"a sink of a head moves the loss by {sinks.grad.abs().max():.1e}: it learns like any weight")
