"""A KV cache in float64: slots of keys, new keys, and rotary positions (docs/kvcache.md).

Dense caches and pages have one form here: tokens, one for each slot, and for each sequence the slots of its keys in
order.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .eight_bit import quantized, scales, scales_of_tokens
from .packed_rows import numbers, packed


@dataclass(frozen=True)
class Rotated:
    """Tokens `[T, H, D]`, rotated and rounded as by a call."""

    value: Tensor
    magnitude: Tensor  # sum of the absolute values of an element's terms; 0 if it is a copy
    either: Tensor  # distance of two roundings that are both right; mostly 0


class Cache:
    """A call of attention_with_kvcache: its tokens, and the expected caches after it."""

    def __init__(self, given: dict[str, Any], dtype: torch.dtype, stored: torch.dtype) -> None:
        self.given, self.dtype, self.stored = given, dtype, stored
        self.has_eight_bits = stored.itemsize == 1 and stored != torch.uint8
        for name in ("k_descale", "v_descale"):
            if given.get(name) is not None:
                given[name] = given[name].clone()
        self.paged = given.get("page_table") is not None
        starts = given.get("cu_seqlens_q")
        self.batch = len(given["q"]) if starts is None else len(starts) - 1
        self.k, self.v = (Rotated(x, torch.zeros_like(x), torch.zeros_like(x)) for x in self._slots())
        self.rows: Tensor | None = None  # uint8 [slots, Hkv, 656]
        if stored == torch.uint8:
            rows = given["k_bytes"]
            self.rows = (rows if self.paged else rows.transpose(1, 2)).flatten(0, 1).clone()
        q = tokens(given["q"])
        self.q = Rotated(q.clone(), torch.zeros_like(q), torch.zeros_like(q))
        for b in range(self.batch):
            self._add_sequence(b)

    def _slots(self) -> Iterator[Tensor]:
        """k_cache and v_cache as `[slots, Hkv, D]`."""
        for name in ("k_cache", "v_cache"):
            yield (self.given[name] if self.paged else self.given[name].transpose(1, 2)).flatten(0, 1).clone()

    def in_cache_layout(self, x: Tensor) -> Tensor:
        """`[slots, Hkv, D]` in the shape of the caller's tensor."""
        if self.paged:
            return x.unflatten(0, self.given["k_cache"].shape[:2])
        rows, _, length, _ = self.given["k_cache"].shape
        return x.unflatten(0, (rows, length)).transpose(1, 2)

    def _add_sequence(self, b: int) -> None:
        keys = self.key_slots(b)
        length, new = len(keys), self.new_tokens(b)
        queries = self.query_tokens(b)
        starts = self.given.get("rotary_start")  # positions of the first query and of the first new key
        start = None if starts is None else _of(starts, b)
        positions = torch.arange(len(queries)) + (length - len(queries) if start is None else start)
        if self.given.get("rotary_q_fixed"):
            positions = positions[:1].expand(len(queries))
        self._put(self.q, queries, self.q.value[queries], positions.clamp(min=0))
        if len(new):
            k, v = (tokens(self.given[name])[new] for name in ("k", "v"))
            first = length - len(new) if start is None else start
            self._put(self.k, keys[length - len(new) :], k, first + torch.arange(len(new)))
            self.v.value[keys[length - len(new) :]] = v
            if self.rows is not None:
                slots = keys[length - len(new) :]
                self.rows[slots] = packed(self.k.value[slots])
                self.k.value[slots] = numbers(self.rows[slots], self.dtype)
                self.v.value[slots] = self.k.value[slots][..., : v.shape[-1]]
            if self.has_eight_bits:
                self._quantize(b, keys[length - len(new) :])

    def _quantize(self, b: int, slots: Tensor) -> None:
        """Store new keys and values as numbers of 8 bits, with scales of their own where each token has one. With
        `v_dim`, values are columns of the keys, and have their scales.
        """
        columns = self.given.get("v_dim")
        for name, where in (("k", self.k), ("v", self.v)):
            if name == "v" and columns is not None:
                where.value[slots] = self.k.value[slots][..., :columns]
                self.given["v_descale"] = self.given.get("k_descale")
                continue
            descale, cache = self.given.get(f"{name}_descale"), self.given[f"{name}_cache"]
            if descale is not None and descale.shape == cache.shape[:3]:
                own = scales_of_tokens(where.value[slots], self.stored).double()
                if self.paged:
                    descale[slots // cache.shape[1], slots % cache.shape[1]] = own
                else:
                    descale[slots // cache.shape[2], :, slots % cache.shape[2]] = own
            scale = self.scales(name, b, slots)
            scale = torch.ones(()) if scale is None else scale[..., None]
            where.value[slots] = quantized(where.value[slots], scale, self.stored)

    def scales(self, name: str, b: int, slots: Tensor) -> Tensor | None:
        """Scales of the keys or values of sequence b in these slots."""
        return scales(self.given, f"{name}_descale", self.given[f"{name}_cache"], self.batch, b, slots)

    def query_tokens(self, b: int) -> Tensor:
        return self._tokens_of(b, "q")

    def new_tokens(self, b: int) -> Tensor:
        return torch.arange(0) if self.given.get("k") is None else self._tokens_of(b, "k")

    def _tokens_of(self, b: int, name: str) -> Tensor:
        starts = self.given.get("cu_seqlens_q")
        if name == "k" and self.given.get("cu_seqlens_k_new") is not None:
            starts = self.given["cu_seqlens_k_new"]
        if starts is not None and self.given[name].ndim == 3:
            return torch.arange(int(starts[b]), int(starts[b + 1]))
        length = self.given[name].shape[2]
        return torch.arange(b * length, (b + 1) * length)

    def key_slots(self, b: int) -> Tensor:
        """The slot of each key of sequence b, with the keys of this call."""
        position = torch.arange(_of(self.given["cache_seqlens"], b) + len(self.new_tokens(b)))
        rows = self.given.get("cache_batch_idx")
        row = b if rows is None else int(rows[b])
        if self.paged:
            page_size = self.given["k_cache"].shape[1]
            return self.given["page_table"][row].long()[position // page_size] * page_size + position % page_size
        return row * self.given["k_cache"].shape[2] + position

    def hidden(self, b: int) -> int:
        """Number of positions at the front without a key."""
        leftpad = self.given.get("leftpad_k")
        return 0 if leftpad is None else int(leftpad[b])

    def _put(self, where: Rotated, index: Tensor, x: Tensor, positions: Tensor) -> None:
        """Write `x [S, H, D]`, rotated by the angles of its positions and rounded, to the tokens `index`."""
        cos, sin = self.given.get("rotary_cos"), self.given.get("rotary_sin")
        value, magnitude = x.clone(), torch.zeros_like(x)
        if cos is not None and sin is not None:
            n = torch.arange(cos.shape[1])
            first, second = n, n + len(n)
            if self.given.get("rotary_interleaved", True):
                first, second = 2 * n, 2 * n + 1
            c, s = cos[positions][:, None], sin[positions][:, None]  # [S, 1, rotary_dim / 2]
            a, b = x[..., first], x[..., second]
            value[..., first], value[..., second] = a * c - b * s, a * s + b * c
            magnitude[..., first], magnitude[..., second] = (a * c).abs() + (b * s).abs(), (a * s).abs() + (b * c).abs()
        error = 3 * torch.finfo(torch.float64 if self.dtype == torch.float64 else torch.float32).eps * magnitude
        where.value[index], where.magnitude[index] = self._rounded(value), magnitude
        where.either[index] = (self._rounded(value + error) - self._rounded(value - error)).abs()

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).double()


def _of(lengths: Any, b: int) -> int:
    """Sequence `b`'s of lengths `[B]`, or of an int for all."""
    return int(lengths if isinstance(lengths, int) else lengths[b])


def tokens(x: Tensor) -> Tensor:
    """`[B, H, S, D]` or `[T, H, D]` as `[T, H, D]`."""
    return x.transpose(1, 2).flatten(0, 1) if x.ndim == 4 else x
