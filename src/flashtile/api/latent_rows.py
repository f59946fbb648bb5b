"""Latent rows in DeepSeek's layout of 656 bytes, made of numbers, and back."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..call.latent_rows import E4M3, FEATURES, LATENT, ROW_BYTES, is_packed, pack, unpack
from ..errors import ArgumentError

PACK = f"flashtile.pack_latent_rows(rows) with rows [2, 1, 100, {FEATURES}]"
UNPACK = f"flashtile.unpack_latent_rows(rows, torch.bfloat16) with rows uint8 [2, 1, 100, {ROW_BYTES}]"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class PackedLatentRows(NamedTuple):
    """Latent rows of 656 bytes.

    Attributes:
        rows: uint8 `[..., 656]`, as `attention_with_kvcache` takes them with `v_dim=512`.
        error: a tensor of one number, the root mean square of what packing changes, divided by the root mean square of
            the numbers; about 0.025.
    """

    rows: Tensor
    error: Tensor


def pack_latent_rows(x: Tensor) -> PackedLatentRows:
    """Pack latent rows into DeepSeek's 656 bytes a token (DeepSeek-AI, "DeepSeek-V3.2", FlashMLA's cache in FP8).

    A row is 512 numbers of float8_e4m3fn, four float32 scales, each of 128 of them, and 64 features in bfloat16. Scales
    are the least for which all numbers fit: the largest of 128 becomes 448.

    Example:
        >>> rows, error = flashtile.pack_latent_rows(torch.randn(2, 1, 100, 576))
        >>> rows.dtype, rows.shape, bool(error < 0.03)
        (torch.uint8, torch.Size([2, 1, 100, 656]), True)

    Args:
        x: `[..., 576]`, floating-point: the latent vector of 512 features, then 64 features turned by the position. NaN
            stays NaN, and has no influence on scales.

    Returns:
        The bytes, and the relative error.

    Raises:
        ArgumentError: `x` has another width or dtype.
    """
    if not isinstance(x, Tensor) or x.dtype not in DTYPES or x.dim() == 0 or x.shape[-1] != FEATURES:
        raise ArgumentError("x", x, f"float16, bfloat16, float32 or float64 [..., {FEATURES}]", PACK)
    rows = pack(x)
    numbers = x.float()
    error = (unpack(rows, torch.float32) - numbers).square().mean().sqrt() / numbers.square().mean().sqrt()
    return PackedLatentRows(rows, error)


def unpack_latent_rows(rows: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers of latent rows of 656 bytes: of 512, each times its scale in float32, rounded to `dtype`.

    Example:
        >>> rows, _ = flashtile.pack_latent_rows(torch.ones(3, 576))
        >>> bool((flashtile.unpack_latent_rows(rows) == 1).all())
        True

    Args:
        rows: uint8 or float8_e4m3fn `[..., 656]`, any strides.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        `[..., 576]` of `dtype`.

    Raises:
        ArgumentError: an argument is not what it should be.
    """
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.uint8, E4M3) or rows.shape[-1:] != (ROW_BYTES,):
        raise ArgumentError("rows", rows, f"uint8 or float8_e4m3fn [..., {ROW_BYTES}]", UNPACK)
    if dtype not in DTYPES:
        raise ArgumentError("dtype", dtype, "float16, bfloat16, float32 or float64", UNPACK)
    return unpack(rows.view(torch.uint8), dtype)


def packed_cache(q: Tensor, k_cache: Tensor, v_dim: object) -> Tensor:
    """A cache of float8_e4m3fn whose rows are 656 bytes, as bytes; any other as it is."""
    if isinstance(k_cache, Tensor) and isinstance(q, Tensor) and v_dim == LATENT and not is_packed(k_cache):
        wide = k_cache.dtype is E4M3 and k_cache.dim() > 0 and k_cache.shape[-1] == ROW_BYTES
        if wide and q.dim() > 0 and q.shape[-1] == FEATURES:
            return k_cache.view(torch.uint8)
    return k_cache
