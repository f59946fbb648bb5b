"""Problems with latent rows of 656 bytes, made of those whose values are columns of a cache's keys."""

import random
from dataclasses import replace

import torch
from torch import Tensor

from .case import Case
from .draw import RECORDED
from .eight_bit import ROTARY

PART = 0.3  # share of the problems with a cache of latent rows
LATENT, FEATURES, GROUP = 512, 576, 128


def maybe_packed(case: Case) -> Case:
    """The problem, or one with rows of bytes."""
    choices = random.Random(f"packed rows of {case.seed}")  # the same for all variations
    cached = case.arguments.get("k_cache") is not None and case.arguments.get("v_dim") is not None
    if choices.random() >= PART or not cached or case.seed in RECORDED or case.tangents:
        return case
    return case if case.arguments["k_cache"].dtype.itemsize == 1 else packed_rows(case)


def packed_rows(case: Case) -> Case:
    """The problem with rows of 576 features in bytes, 512 for values. Its own features are repeated, and scores stay
    about as large. Without rotary positions, whose roundings may be open.
    """
    arguments = {name: x for name, x in case.arguments.items() if name not in ROTARY}
    width = arguments["k_cache"].shape[-1]
    for name in ("q", "k", "k_cache"):
        if arguments.get(name) is not None:
            arguments[name] = arguments[name][..., torch.arange(FEATURES, device=arguments[name].device) % width]
    if arguments.get("scale") is not None:
        arguments["scale"] *= width / FEATURES
    arguments |= {"k_cache": bytes_of(arguments["k_cache"]), "v_dim": LATENT}
    return replace(case, arguments=arguments, dout=None, dlse=None, description="")


def bytes_of(x: Tensor) -> Tensor:
    """Rows `[..., 576]` as bytes `[..., 656]`, by scales that are no powers of two; NaN, as memory that no call may
    read, is NaN in numbers and scales.
    """
    latent = x[..., :LATENT].float().unflatten(-1, (-1, GROUP))
    scales = latent.abs().nan_to_num(0.0, posinf=0.0).amax(-1).clamp(min=1e-6) / 300  # [..., 4]
    numbers = (latent / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2)
    scales = scales.where(~latent.isnan().all(-1), torch.nan)
    parts = numbers, scales, x[..., LATENT:].to(torch.bfloat16)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
