"""Tensors of 8 bits in float64: the numbers of a format, where the scale of a key or query is, and what products of 8
bits may lose (docs/design/exactness.md).
"""

from typing import Any

import torch
from torch import Tensor

# Format: bits of the mantissa, exponent of the smallest normal number, largest number.
FLOATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}
DESCALES = ("k_descale", "v_descale")


def has_eight_bits(x: Tensor) -> bool:
    return x.dtype in FLOATS or x.dtype == torch.int8


def magnitudes(dtype: torch.dtype) -> Tensor:
    """All numbers of a format from 0 on, in order: number n has the bits of n."""
    if dtype == torch.int8:
        return torch.arange(128, dtype=torch.float64)
    mantissa, smallest, largest = FLOATS[dtype]
    step = 2.0 ** (smallest - mantissa)
    values = [n * step for n in range(2**mantissa)]
    while values[-1] < largest:
        exponent = len(values) // 2**mantissa - 1
        values.append((2**mantissa + len(values) % 2**mantissa) * step * 2.0**exponent)
    return torch.tensor(values, dtype=torch.float64)


def quantized(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that stand for `x`: the nearest of the format, the even one of two, the largest beyond."""
    grid = magnitudes(dtype)
    ratio = (x.float() / scale.float()).double()
    size = ratio.abs().nan_to_num(0.0).clamp(max=float(grid[-1]))
    above = torch.searchsorted(grid, size.contiguous()).clamp(max=len(grid) - 1)
    below = (above - 1).clamp(min=0)
    up, down = grid[above] - size, size - grid[below]
    index = torch.where(up < down, above, below).where(up != down, torch.where(above % 2 == 0, above, below))
    index = above.where(grid[above] == size, index)
    nearest = grid[index] * torch.where(ratio < 0, -1.0, 1.0)
    return nearest.where(~ratio.isnan(), 0.0 if dtype == torch.int8 else torch.nan)


def scales_of_tokens(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 scales of tokens `x [T, H, D]`, for which the largest number becomes the format's largest."""
    size = x.float().abs()
    size = size.where(~size.isnan(), 0.0).clamp(max=torch.finfo(torch.float32).max)
    scale = size.amax(-1) / float(magnitudes(dtype)[-1])
    return scale.where(scale > 0, 1.0)


def scales(given: dict[str, Any], name: str, cache: Tensor, batch: int, sequence: int, slots: Tensor) -> Tensor | None:
    """Scales `[n, Hkv]` of the keys in these slots; `None` if the call has none. `cache` is the caller's tensor."""
    x = given.get(name)
    if x is None:
        return None
    paged = given.get("page_table") is not None
    if x.ndim == 1:
        return x.expand(len(slots), -1)
    if x.ndim == 2 and not (paged and len(x) == len(cache)):
        return x[sequence].expand(len(slots), -1)
    if x.ndim == 3 and not paged:
        return x.transpose(1, 2).flatten(0, 1)[slots]
    page, slot = slots // cache.shape[1], slots % cache.shape[1]
    if x.ndim == 2:
        return x[page]
    return x[page, slot if x.shape[1] > 1 else 0]


def scales_of_rows(given: dict[str, Any], name: str, sequence: int, rows: Tensor) -> Tensor | None:
    """Scales `[n, Hq or Hkv]` of dense or packed tokens: q, or keys without pages; `None` if the call has none. `rows`
    count all tokens.
    """
    x, of = given.get(name), given[name[0]]
    if x is None:
        return None
    if x.ndim == 1:
        return x.expand(len(rows), -1)
    dense = of.ndim == 4
    if x.ndim == 3:
        return x.transpose(1, 2).flatten(0, 1)[rows]
    if not dense and tuple(x.shape) == (of.shape[1], of.shape[0]):
        return x.T[rows]
    return x[sequence].expand(len(rows), -1)


# What GPUs lose with queries of 8 bits, beside what the contract allows of every dtype.
WEIGHT = 2.0**-4  # the error of a weight that is rounded to 8 bits, relative to itself
LEAST_WEIGHT = 2.0**-11  # the error of a small weight, relative to its block's largest
LEAST_BLOCK = 2.0**-70  # the same, relative to the sum of a row's weights: what float32 cannot hold beside it
SUM = 2.0**-13  # the last bit of a matrix unit's sum
BLOCK = 128  # keys of a sum in a matrix unit, and of weights that are rounded relative to the largest one


def lost_by_blocks(weights: Tensor, values: Tensor) -> Tensor:
    """What is lost of weights `[H, Sq, Sk]` that are rounded relative to the largest of their block, in sums of values
    `[H, Sk, Dv]`: `[H, Sq, Dv]`.
    """
    lost = weights.clone()
    for block in lost.split(BLOCK, -1) if lost.shape[-1] > 0 else ():  # views
        block.copy_(torch.minimum(block, (LEAST_WEIGHT * block.amax(-1, keepdim=True)).clamp(min=LEAST_BLOCK)))
    return torch.nan_to_num(lost) @ torch.nan_to_num(values.abs(), posinf=0.0)


# What products in float16 lose over latent rows of 8 bits, where each row's numbers are scaled.
LEAST = 2.0**-25  # half of float16's smallest number
WEIGHTS = 2.0**15  # a row's largest weight
QUERIES = 2.0**14  # a row's largest query is that at least


def lost_scores(q: Tensor, k: Tensor, scale: float, visible: Tensor) -> Tensor:
    """The largest error of a row's scores by queries `[H, Sq, D]` that become float16, `[H, Sq]`."""
    largest = q.abs().nan_to_num(0.0, posinf=0.0).amax(-1)
    of_keys = k.abs().nan_to_num(0.0, posinf=0.0).sum(-1)[:, None].where(visible, 0.0)  # [H, Sq, Sk]
    return LEAST / QUERIES * abs(scale) * largest * torch.nn.functional.pad(of_keys, (0, 1)).amax(-1)
