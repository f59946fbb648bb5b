"""Masks of transformers without `Sq * Sk` memory, until an operation needs them dense.

A model hands its mask from the mask function on to the attention function. Between the two it may slice it, move it, or
combine it with another mask. A `TileMask` is a tensor `[B, 1, Sq, Sk]` for all that: any operation on it makes the
dense mask. The attention function reads the pattern, or takes the mask function as one of flashtile.

It is bool, as the mask of "sdpa". Models that do not accept "sdpa" are written for the mask of "eager" alone, numbers
that are added to scores, and get those.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (  # pyright: ignore - optional
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing  # pyright: ignore - optional

from ... import MaskMod, private_torch
from .functions import function_of, mask_mod_of
from .models import takes_numbers
from .patterns import Pattern, pattern_of
from .segments import Segments, segments_of


class TileMask(Tensor):
    """A mask `[B, 1, Sq, Sk]`, bool or of numbers to add, that is known by its pattern or its function, and has no
    memory.

    Attributes:
        pattern: the visible pairs, by absolute positions; `None` if the function alone has them.
        q_offset, kv_offset: absolute positions of the first query and key.
    """

    pattern: Pattern | None
    q_offset: int
    kv_offset: int
    _make: Callable[[], Tensor]
    _make_mod: Callable[[], MaskMod | None]
    _dense: Tensor | None
    _mod: tuple[MaskMod | None] | None
    _segments: tuple[Segments | None] | None

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, int, int, int],
        like: Tensor,
        pattern: Pattern | None,
        offsets: tuple[int, int],
        make: Callable[[], Tensor],
        make_mod: Callable[[], MaskMod | None],
    ) -> "TileMask":
        mask = private_torch.make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        mask.pattern, (mask.q_offset, mask.kv_offset) = pattern, offsets
        mask._make, mask._make_mod = make, make_mod
        mask._dense, mask._mod, mask._segments = None, None, None
        return mask

    def dense(self) -> Tensor:
        """The visible pairs as bool `[B, 1, Sq, Sk]`, made once."""
        if self._dense is None:
            self._dense = self._make()
        return self._dense

    def mod(self) -> MaskMod | None:
        """The mask as a function of a call's positions, traced once; `None` if it cannot be traced."""
        if self._mod is None:
            self._mod = (self._make_mod(),)
        return self._mod[0]

    def segments(self) -> Segments | None:
        """Segments of queries and keys at the same positions, found once; `None` where the pattern has none."""
        if self._segments is None:
            batch, _, length, keys = self.shape
            found = None
            if self.pattern is not None and length == keys and self.q_offset == self.kv_offset == 0:
                found = segments_of(self.pattern, batch, length, self.device)
            self._segments = (found,)
        return self._segments[0]

    def __repr__(self, **unused: Any) -> str:
        return f"TileMask({list(self.shape)}, {self.pattern})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(densified, args), **densified(kwargs or {}))


def densified(tree: Any) -> Any:
    """Nested arguments of an operation, with dense masks."""
    if isinstance(tree, TileMask):
        return of_dtype(tree.dense(), tree.dtype)
    if isinstance(tree, dict):
        return {key: densified(x) for key, x in tree.items()}
    return type(tree)(map(densified, tree)) if isinstance(tree, list | tuple) else tree


def of_dtype(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask, or numbers to add to scores: 0 for visible pairs, else the smallest number."""
    if dtype == torch.bool:
        return visible
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def tile_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """The mask function of `"tile_attention"`, with the arguments of transformers' `sdpa_mask` and `eager_mask`.

    Returns:
        A `TileMask` where the pattern is known, or the function can be traced; a dense mask `[B, 1, Sq, Sk]` of other
        functions, of one query and no known pattern, and of one query over a static cache, whose length is a tensor
        and changes between replays of a CUDA graph. While a graph is traced, `None` where all of the mask is causal or
        nothing is hidden, and else a dense mask. Masks are bool; for models that do not accept "sdpa" they are numbers
        to add, also where all is causal.
    """
    others = {"dtype": torch.float32, "config": None, "local_size": None} | others
    numbers = others["config"] is not None and takes_numbers(type(others["config"]))
    dtype = others["dtype"] if numbers else torch.bool
    settings: dict[str, Any] = {
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
    }
    settings |= {"use_vmap": use_vmap, "device": device, "q_offset": q_offset}
    if is_tracing(attention_mask):
        skips: dict[str, Any] = {
            "allow_is_causal_skip": allow_is_causal_skip and not numbers,
            "allow_is_bidirectional_skip": allow_is_bidirectional_skip,
        }
        if is_left_out(q_length, kv_length, settings, **skips):
            return None
        visible = sdpa_mask(batch_size, q_length, kv_length, **settings, **skips, local_size=others["local_size"])
        return None if visible is None else of_dtype(visible, dtype)

    def make() -> Tensor:
        visible = sdpa_mask(batch_size, q_length, kv_length, **settings, allow_is_causal_skip=False)
        assert visible is not None
        return visible

    pattern = pattern_of(mask_function)
    if pattern is not None and pattern.padding is not None:
        pattern = None
    single = q_length == 1 and (pattern is None or isinstance(q_offset, Tensor))
    if private_torch.make_wrapper_subclass is None or single:
        return of_dtype(make(), dtype)
    start = settings["q_offset"] = int(q_offset)  # the cache adds to a tensor before the layers read their mask
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        seen = padding[:, kv_offset : kv_offset + kv_length]
        padding = None if seen.all() else padding
    like = torch.empty(0, dtype=dtype, device=device)

    def make_mod() -> MaskMod | None:
        return mask_mod_of(mask_function, padding, (start, kv_offset), like.device)

    shape = (batch_size, 1, q_length, kv_length)
    known = None if pattern is None else pattern._replace(padding=padding)
    mask = TileMask(shape, like, known, (start, kv_offset), make, make_mod)
    if known is None or known.chunk is not None or known.packed is not None:
        mod = mask.mod()  # now, since compiled layers that use it cannot trace it
        if known is None and mod is None:
            return of_dtype(mask.dense(), dtype)
        if known is None and mod is not None:  # it has the offsets and the padding
            settings |= {"mask_function": function_of(mod), "attention_mask": None, "q_offset": 0, "kv_offset": 0}
    settings["use_vmap"] = False  # which fails in operations on the mask; functions that are known or traced need none
    return mask


def is_left_out(
    q_length: int,
    kv_length: int,
    settings: dict[str, Any],
    *,
    allow_is_causal_skip: bool,
    allow_is_bidirectional_skip: bool,
) -> bool:
    """Whether attention needs no mask: all of it is causal, or nothing is hidden, in self-attention without padding."""
    q_offset, function = settings["q_offset"], settings["mask_function"]
    if settings["attention_mask"] is not None or isinstance(q_offset, Tensor):
        return False
    if q_length != kv_length or q_offset != settings["kv_offset"]:
        return False
    causal = function is causal_mask_function and allow_is_causal_skip
    return causal or (function is bidirectional_mask_function and allow_is_bidirectional_skip)
