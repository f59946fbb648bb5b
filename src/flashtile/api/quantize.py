"""Keys or values of 8 bits with their scales, made from another dtype."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.eight_bit import DTYPES_IN_WORDS, FORMATS, own_scales, quantize
from ..errors import ArgumentError

EXAMPLE = "flashtile.quantize_kv(k_cache, torch.float8_e4m3fn, per='token') with k_cache [2, 4, 512, 64]"


class QuantizedKV(NamedTuple):
    """Keys or values of 8 bits: `values * descale` stand for the numbers that they were made of.

    Attributes:
        values: in the shape that was given.
        descale: float32, in a shape that `attention_with_kvcache` takes as `k_descale` or `v_descale`.
        error: a tensor of one number, the root mean square of what quantization changes, divided by the root mean
            square of the numbers. About 0.026 in float8_e4m3fn and 0.05 in float8_e5m2; in int8, less for numbers of
            similar size.
    """

    values: Tensor
    descale: Tensor
    error: Tensor


def quantize_kv(
    x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, per: str = "token", paged: bool = False
) -> QuantizedKV:
    """Quantize keys or values of a cache, with the least scales for which all numbers fit.

    Example:
        >>> k = torch.randn(2, 4, 100, 64)
        >>> values, descale, error = flashtile.quantize_kv(k, torch.int8, per="head")
        >>> values.dtype, descale.shape, bool(error < 0.02)
        (torch.int8, torch.Size([4]), True)

    Args:
        x: `[B, Hkv, S, D]`, or with `paged` pages `[num_pages, page_size, Hkv, D]`; floating-point. NaN has no
            influence on scales; an infinity counts as the largest float32.
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        per: what a scale is for: a "head", a "sequence" and head, a "page" and head, or a "token" and head.
        paged: x has pages.

    Returns:
        The numbers, their scales, and the relative error.

    Raises:
        ArgumentError: an argument is not what it should be.
    """
    if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
        raise ArgumentError("x", x, "floating-point [B, Hkv, S, D], or pages [num_pages, page_size, Hkv, D]", EXAMPLE)
    if dtype not in FORMATS:
        raise ArgumentError("dtype", dtype, DTYPES_IN_WORDS, EXAMPLE)
    kinds = ("head", "page", "token") if paged else ("head", "sequence", "token")
    if per not in kinds:
        raise ArgumentError("per", per, " or ".join(map(repr, kinds)) + (" of pages" if paged else ""), EXAMPLE)
    by_slot = x if paged else x.transpose(1, 2)  # [B, S, Hkv, D]
    shared = {"head": (0, 1), "sequence": (1,), "page": (1,), "token": ()}[per]
    groups = by_slot.movedim(shared, tuple(range(-1 - len(shared), -1))) if shared else by_slot
    descale = own_scales(groups.flatten(-1 - len(shared)), dtype)  # one for each group of numbers
    scale = descale
    for n in shared:
        scale = scale.unsqueeze(n)
    values = quantize(by_slot, scale[..., None], dtype)
    numbers = by_slot.float()
    error = (values.float() * scale[..., None] - numbers).square().mean().sqrt() / numbers.square().mean().sqrt()
    if not paged:
        values = values.transpose(1, 2)
        descale = descale.transpose(1, 2) if per == "token" else descale
    elif per == "page":
        descale = descale[:, None]
    return QuantizedKV(values.contiguous(), descale.contiguous(), error)
