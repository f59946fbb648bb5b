"""Rotary position embeddings as torch operations (Su et al., "RoFormer", 2021, section 3.2.2)."""

import torch
from torch import Tensor


def rotary_tables(length: int, rotary_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of positions from 0 on, float32 `[length, rotary_dim / 2]`."""
    return tables_of(torch.arange(length, device=device), rotary_dim, base)


def tables_of(positions: Tensor, rotary_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles of positions `[S]`, float32 `[S, rotary_dim / 2]`."""
    frequency = base ** -(torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float64) / rotary_dim)
    angle = positions[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs of features (n, n + rotary_dim / 2) of `x [B, H, S, D]` by the angles `[S, rotary_dim / 2]`.

    The rest of the features stays. Products and sums are in float32 at least, the result has x's dtype.
    """
    half = cos.shape[1]
    a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat([(a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype), rest], dim=-1)
