"""Step 11, where the ladder leads: `flashtile.attention` where flashtile is installed, else PyTorch's SDPA.

This is the only place of the package that looks for flashtile.
"""

from typing import Any

import torch
from torch import Tensor

flashtile: Any
try:
    import flashtile  # pyright: ignore[reportMissingImports]
except ImportError:
    flashtile = None

NAME = "flashtile.attention" if flashtile is not None else "PyTorch's SDPA"
STEP = f"11 {NAME}"


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Attention `[B, heads, N, d]` of `[B, heads, N, d]`."""
    if flashtile is not None:
        return flashtile.attention(q, k, v, causal=causal)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same of one head: `[1, 1, N, d]` of `[N, d]`."""
    return attention(q[None, None], k[None, None], v[None, None])


def plan(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """What flashtile says of this call `[B, heads, N, d]`; `None` where it is not installed."""
    return None if flashtile is None else str(flashtile.explain(q, k, v))


def tile(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...] | None:
    """Rows and keys of a tile of flashtile's backend `tiled` for this call, and heads and sequences that it computes
    together; `None` where flashtile is not installed.
    """
    if flashtile is None:
        return None
    words = flashtile.explain(q, k, v, backend="tiled").tile
    return tuple(int(word.split()[-1]) for word in words.split(", "))
