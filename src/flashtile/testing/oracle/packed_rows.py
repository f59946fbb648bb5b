"""Latent rows of 656 bytes in float64 (docs/kvcache.md): 512 numbers in float8_e4m3fn, four scales, 64 in bfloat16."""

import numpy as np
import torch
from torch import Tensor

from .eight_bit import magnitudes, quantized, scales_of_tokens

LATENT, GROUP, SCALES_END, WIDTH = 512, 128, 528, 656


def numbers(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers `[..., 576]` of bytes `[..., 656]`: each times its scale in float32, rounded to q's dtype."""
    data = np.ascontiguousarray(rows.cpu().numpy())
    table = torch.cat((magnitudes(torch.float8_e4m3fn), torch.tensor([torch.nan], dtype=torch.float64)))  # 127 is NaN
    code = torch.from_numpy(data[..., :LATENT].astype(np.int64))
    latent = table[code % 128] * torch.where(code < 128, 1.0, -1.0)
    scales = torch.from_numpy(data[..., LATENT:SCALES_END].copy().view(np.float32))  # [..., 4]
    latent = (latent * scales.double().repeat_interleave(GROUP, -1)).float()
    words = torch.from_numpy(data[..., SCALES_END:].copy().view(np.uint16).astype(np.int64))
    rope = (words << 16).to(torch.int32).view(torch.float32)  # a bfloat16 is the upper half of a float32
    return torch.cat((latent, rope), -1).to(dtype).double()


def packed(x: Tensor) -> Tensor:
    """The bytes `[T, H, 656]` that an append writes for tokens `[T, H, 576]`."""
    groups = x[..., :LATENT].unflatten(-1, (-1, GROUP))
    scales = scales_of_tokens(groups, torch.float8_e4m3fn)
    stored = quantized(groups, scales[..., None], torch.float8_e4m3fn).to(torch.float8_e4m3fn).flatten(-2)
    parts = stored, scales.float(), x[..., LATENT:].to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
