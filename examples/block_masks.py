"""Three masks as functions of a pair, each drawn by blocks: work follows what is visible, and no mask is in memory."""

import time

import torch

import flashtile

N, BLOCK = 2048, 128
ids = torch.arange(3).repeat_interleave(torch.tensor([600, 848, 600]))  # the document of each token
MASKS = {
    "prefix of 400, then causal": lambda b, h, i, j: (j <= i) | (j < 400),
    "documents, each causal": lambda b, h, i, j: (j <= i) & (ids[i] == ids[j]),
    "a window, and the first tokens": lambda b, h, i, j: (j <= i) & ((i - j < 200) | (j < 64)),
}

q, k, v = (torch.randn(1, 4, N, 64) for _ in range(3))
for name, visible in {"no mask": lambda b, h, i, j: j >= 0, **MASKS}.items():
    mask = flashtile.MaskMod(visible)
    flashtile.attention(q, k, v, mask=mask)  # the first call of a kind may compile
    start = time.perf_counter()
    flashtile.attention(q, k, v, mask=mask)
    seconds = time.perf_counter() - start
    pairs = visible(0, 0, torch.arange(N)[:, None], torch.arange(N)[None]).expand(N, N)
    print(f"{name}: {pairs.float().mean():.0%} of the pairs, {1e3 * seconds:.1f} ms")
    blocks = pairs.view(N // BLOCK, BLOCK, N // BLOCK, BLOCK).float().mean((1, 3))
    for row in blocks.tolist():
        print("  " + "".join("█" if x == 1 else "▒" if x > 0 else "·" for x in row))
