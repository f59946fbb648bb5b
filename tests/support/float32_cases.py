"""Calls in float32 with values that products of parts have to get right."""

from typing import Any

import torch
from torch import Tensor

from flashtile.testing.case import Case


def case_of(sizes: tuple[int, ...], *, transposed: bool = False, values: str = "", **arguments: Any) -> Case:
    """A dense call; `sizes` are B, Hq, Hkv, Sq, Sk, D, Dv."""
    batch, heads_q, heads_kv, rows, keys, width, width_v = sizes
    generator = torch.Generator().manual_seed(0)

    def randn(heads: int, seqlen: int, width: int) -> Tensor:
        shape = (batch, seqlen, heads, width) if transposed else (batch, heads, seqlen, width)
        x = torch.randn(shape, generator=generator)
        return x.transpose(1, 2) if transposed else x

    q, k, v = randn(heads_q, rows, width), randn(heads_kv, keys, width), randn(heads_kv, keys, width_v)
    dout = randn(heads_q, rows, width_v)
    if values == "infinite":
        v[0, 0, 3, 5], v[0, -1, 7, 1], dout[-1, -1, 5, 5] = torch.inf, torch.nan, -torch.inf
    elif values == "far apart":
        q, v, dout = q * 1e-3, v * 1e30, dout * 1e-20
    elif values == "equal":  # all errors have one sign
        q, k, v, dout = (torch.full_like(x, 1 / 3) for x in (q, k, v, dout))
    elif values == "outliers":
        for x in (q, k, v, dout):
            x[..., ::17] *= 100
    elif values == "ends":  # of the range
        q[..., ::5], v[..., ::3], dout = q[..., ::5] * 1e-38, v[..., ::3] * 2e37, dout * 1e-30
    dlse = torch.randn(q.shape[:3], generator=generator)
    return Case("attention", {"q": q, "k": k, "v": v, **arguments}, dout, dlse)
