"""A random rotation of heads, before queries and keys are quantized."""

import functools
import math

import torch
from torch import Tensor

from ..errors import ArgumentError

EXAMPLE = "flashtile.hadamard(q) with q [2, 8, 512, 128]"


def hadamard(x: Tensor, *, seed: int = 0) -> Tensor:
    """Rotate queries or keys at random, which spreads outliers over all features.

    Features get random signs, then a Hadamard matrix divided by its norm (Ashkboos et al., "QuaRot"; Shah et al.,
    "FlashAttention-3", section 3.3). The product of a query and a key that are rotated alike is what it was before,
    but for rounding, while each is quantized with a smaller error if it had outliers. Rotate after rotary positions.

    Example:
        >>> q, k = torch.randn(2, 1, 4, 100, 64)
        >>> products = flashtile.hadamard(q) @ flashtile.hadamard(k).mT
        >>> torch.allclose(products, q @ k.mT, atol=1e-4)
        True

    Args:
        x: `[..., D]` in bfloat16, float16, float32 or float64; D is even. A D that is no power of two has several
            matrices, of the largest power of two that divides it.
        seed: for the signs; q and k need the same one.

    Returns:
        The rotated tensor, of x's shape and dtype. Sums are in float32, or in float64 of float64.

    Raises:
        ArgumentError: an argument is not what it should be.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype.itemsize == 1:
        raise ArgumentError("x", x, "bfloat16, float16, float32 or float64 [..., D]", EXAMPLE)
    if x.dim() == 0 or x.shape[-1] % 2 != 0:
        raise ArgumentError("x", x, "[..., D] with an even D", EXAMPLE)
    features = x.shape[-1]
    size = features & -features if features else 1
    sums = x.double() if x.dtype == torch.float64 else x.float()
    sums = (sums * signs(features, seed).to(x.device, sums.dtype)).unflatten(-1, (features // size, size))
    half = 1
    while half < size:
        first, second = sums.unflatten(-1, (-1, 2, half)).unbind(-2)
        sums = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return (sums / math.sqrt(size)).flatten(-2).to(x.dtype)


@functools.lru_cache(maxsize=64)
def signs(features: int, seed: int) -> Tensor:
    """A random sign of each feature, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (features,), generator=generator).mul(2).sub(1)
