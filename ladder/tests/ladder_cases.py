"""Calls of one attention with random inputs, as cases of flashtile's fp64 oracle; and what a test may need."""

from typing import Any

import pytest
import torch

from flashtile.testing.case import Case
from flashtile.testing.inputs import query_key_value
from flashtile_ladder._host import cpp

needs_compiler = pytest.mark.skipif(cpp.compiler() is None, reason="there is no C++ compiler")


def dense_case(
    *,
    batch: int = 2,
    num_heads_q: int = 2,
    num_heads_kv: int = 1,
    seqlen_q: int = 7,
    seqlen_k: int = 9,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
    forward_only: bool = False,
    **arguments: Any,
) -> Case:
    """A call with both cotangents; `arguments` add to its own."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    keys = (batch, num_heads_kv, seqlen_k, head_dim)
    q, k, v = query_key_value(kind, ((batch, num_heads_q, seqlen_q, head_dim), keys, keys), dtype, generator)
    dout = torch.randn(q.shape, generator=generator, dtype=wide).to(dtype)
    dlse = torch.randn(q.shape[:-1], generator=generator, dtype=wide)
    return Case("attention", {"q": q, "k": k, "v": v} | arguments, dout, dlse, 0, forward_only=forward_only)
