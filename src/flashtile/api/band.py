"""The band of a mask function as the window of the call: kernels know by the position of a block what it shows."""

from typing import Any

import torch

from .. import private_torch
from ..call.call import Settings
from ..expression.band import Band, split

CAUSAL = Band(right=0)


def with_band(function: str, tensors: dict[str, Any], settings: Settings) -> Settings:
    """The settings of a call whose mask function has other conditions only. A window counts from the last key, a mask
    function from the first one: so the lengths have to be known.
    """
    found = None if settings.mask_mod is None else split(settings.mask_mod)
    if found is None or function not in ("attention", "attention_varlen"):
        return settings
    left, right, rest = found
    band = Band(left, right)
    window = window_of(function, tensors, band)
    if window is not None:
        both = Band(settings.window_left, settings.window_right).both(window)
        settings = settings._replace(window_left=both.left, window_right=both.right)
    elif band == CAUSAL:
        settings = settings._replace(top_left=True)
    else:
        return settings
    return settings._replace(mask_mod=rest)


def window_of(function: str, tensors: dict[str, Any], band: Band) -> Band | None:
    """The sides of a window with the pairs of a band; `None` where the difference of the lengths is not known."""
    q, k = tensors["q"], tensors["k"]
    if function != "attention" or not q.dim() == k.dim() == 4:
        return None
    if private_torch.known(q.shape[2] == k.shape[2]):
        return band
    if torch.compiler.is_compiling() or band == CAUSAL:  # lengths may be symbols; `top_left` holds for all
        return None
    shift = k.shape[2] - q.shape[2]
    return Band(None if band.left is None else band.left + shift, None if band.right is None else band.right - shift)
