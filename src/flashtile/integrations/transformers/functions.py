"""Mask functions of transformers as a `flashtile.MaskMod`, which kernels evaluate pair by pair.

transformers evaluates a mask function over absolute positions, for head 0. The function of a call counts queries and
keys from 0, so their offsets are added. They are captured tensors: as numbers of the formula, each length of a cache
would compile new kernels.
"""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import and_masks, padding_mask_function  # pyright: ignore - optional

from ... import MaskMod
from ...errors import ArgumentError

_untraceable: set[Any] = set()  # by code: a MaskMod of such a function would be kept for each new closure


def mask_mod_of(
    function: Callable[..., Any], padding: Tensor | None, offsets: tuple[int, int], device: torch.device
) -> MaskMod | None:
    """The MaskMod of a mask function and a padding mask; `None` if no formula can be traced.

    Args:
        function: `(batch, head, q, kv) -> bool` over absolute positions.
        padding: bool `[B, S]` over absolute positions of keys; False hides a key.
        offsets: absolute positions of the first query and of the first key.
        device: place of the offsets.
    """
    code = code_of(function)
    if code in _untraceable:
        return None
    whole = function if padding is None else and_masks(function, padding_mask_function(padding))
    q_offset, kv_offset = (torch.full((), n, device=device) if n else 0 for n in offsets)

    def visible(b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return whole(b, h * 0, q_idx + q_offset, k_idx + kv_offset)

    try:
        mod = MaskMod.of(visible)
    except ArgumentError:  # it draws random numbers, say
        mod = None
    if mod is None or not mod.traced:
        _untraceable.add(code)
        return None
    return mod


def function_of(mod: MaskMod) -> Callable[..., Any]:
    """A traced MaskMod as a mask function of transformers: of a call's positions, which broadcast."""
    return lambda batch, head, q, kv: mod.fn(batch, head, q, kv, *mod.tensors)


def code_of(function: Any) -> Any:
    """The code of a function and of the functions in its closure. Closures that one function makes share it."""
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function)
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    nested = [x for value in values for x in (value if isinstance(value, tuple) else (value,))]
    return (code, *(code_of(x) for x in nested if isinstance(x, types.FunctionType)))
