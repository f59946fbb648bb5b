"""A cache of keys and values of 8 bits for transformers' `generate`.

Each layer stores numbers of 8 bits and a float32 scale for each token and head. `"tile_attention"` reads them as they
are; any other operation on what the cache returns makes the dequantized keys or values.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin  # pyright: ignore - optional

from ... import private_torch
from ...api.kvcache import attention_with_kvcache
from ...call.eight_bit import DTYPES_IN_WORDS, FORMATS, bits
from ...errors import ArgumentError

LEAST_ROOM = 64  # tokens of a layer's first allocation
EXAMPLE = "model.generate(tokens, past_key_values=EightBitCache(torch.int8))"


class EightBitCache(Cache):
    """A cache of 8 bits, which grows as it fills: `model.generate(tokens, past_key_values=EightBitCache(torch.int8))`.

    It serves models whose layers are all attention. Of sliding windows it keeps all tokens. Models that compute with
    what their cache holds before attention, as those with latent attention, get dequantized numbers.

    Args:
        dtype: float8_e4m3fn, float8_e5m2 or int8.

    Raises:
        ArgumentError: another dtype.
    """

    def __init__(self, dtype: torch.dtype = torch.float8_e4m3fn):
        if dtype not in FORMATS:
            raise ArgumentError("dtype", dtype, DTYPES_IN_WORDS, EXAMPLE)
        super().__init__(layer_class_to_replicate=partial(EightBitLayer, dtype))  # pyright: ignore - called alone

    def nbytes(self) -> int:
        """Bytes of all layers, with their scales and the room that is not filled yet."""
        layers = (x for x in self.layers if isinstance(x, EightBitLayer))
        return sum(x.nbytes for layer in layers for x in layer.tensors())


class EightBitLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, Hkv, room, D]` and Dv, and their scales `[B, Hkv, room]`."""

    is_sliding = False
    is_croppable = True

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype, self.length = dtype, 0
        self.k_descale: Tensor | None = None
        self.v_descale: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.keys, self.values, self.k_descale, self.v_descale) if x is not None]

    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace all tensors. Operations that 8-bit floats lack see them as integers."""
        if self.is_initialized:
            changed = [change(bits(x)).view(x.dtype) for x in self.tensors()]
            self.keys, self.values, self.k_descale, self.v_descale = changed

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads = key_states.shape[:2]
        device = self.device = key_states.device
        self.keys, self.values = (
            torch.zeros(batch, heads, LEAST_ROOM, x.shape[-1], dtype=self.dtype, device=device)
            for x in (key_states, value_states)
        )
        self.k_descale, self.v_descale = (torch.ones(batch, heads, LEAST_ROOM, device=device) for _ in range(2))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values; returns all that are stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        end, room = self.length + key_states.shape[2], self.keys.shape[2]
        if end > room:
            more = max(end, 2 * room) - room
            self.replace(lambda x: torch.cat((x, x.new_zeros(*x.shape[:2], more, *x.shape[3:])), dim=2))
        assert self.keys is not None
        assert self.values is not None
        attention_with_kvcache(  # queries: none
            key_states[:, :, :0],
            self.keys,
            self.values,
            cache_seqlens=self.length,
            k=key_states,
            v=value_states,
            k_descale=self.k_descale,
            v_descale=self.v_descale,
        )
        self.length = end
        return EightBitKeys(self, "keys", key_states.dtype), EightBitKeys(self, "values", value_states.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.length = 0

    def offload(self) -> None:
        self.replace(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.replace(lambda x: x.to(self.device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens; a positive number is the length that remains, as in transformers before 5.18."""
        remaining = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        self.length = max(0, min(self.length, remaining))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.replace(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.replace(lambda x: x.repeat_interleave(repeats, dim=0))


class EightBitKeys(Tensor):
    """Keys or values `[B, Hkv, S, D]` of a layer in the model's dtype, without memory: what is stored is `stored` and
    `descale`.
    """

    stored: Tensor
    descale: Tensor

    @staticmethod
    def __new__(cls, layer: EightBitLayer, name: str, dtype: torch.dtype) -> "EightBitKeys":
        stored, descale = getattr(layer, name), layer.k_descale if name == "keys" else layer.v_descale
        assert descale is not None
        stored = stored[:, :, : layer.length]
        x = private_torch.make_wrapper_subclass(cls, stored.shape, dtype=dtype, device=stored.device)
        x.stored, x.descale = stored, descale[:, :, : layer.length]
        return x

    def dequantized(self) -> Tensor:
        return (self.stored.float() * self.descale[..., None]).to(self.dtype)

    def __repr__(self, **unused: Any) -> str:
        return f"EightBitKeys({list(self.shape)}, {self.stored.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*map(dequantized, args), **dequantized(kwargs or {}))


def dequantized(tree: Any) -> Any:
    """Nested arguments of an operation, with dequantized keys and values."""
    if isinstance(tree, EightBitKeys):
        return tree.dequantized()
    if isinstance(tree, dict):
        return {key: dequantized(x) for key, x in tree.items()}
    return type(tree)(map(dequantized, tree)) if isinstance(tree, list | tuple) else tree


def is_eight_bit(key: Tensor, value: Tensor) -> bool:
    """Whether attention reads a layer's stored numbers."""
    return isinstance(key, EightBitKeys) and isinstance(value, EightBitKeys)


def attend_stored(query: Tensor, key: EightBitKeys, value: EightBitKeys, settings: dict[str, Any]) -> Tensor:
    """Attention over a layer's stored numbers."""
    scales = {"k_descale": key.descale, "v_descale": value.descale}
    return attention_with_kvcache(query, key.stored, value.stored, cache_seqlens=key.shape[2], **scales, **settings)
