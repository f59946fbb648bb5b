"""The KV cache in front of attention: where new keys go, rotary positions, and the paged call that remains.

A dense cache `[B_cache, Hkv, S_max, D]` is a paged one whose pages are as long as the cache: its page table has one
column, `cache_batch_idx`. So one path serves both. Nothing here reads a GPU tensor on the host: what would fall outside
the cache is not written there, and on a CPU it is an error.
"""

import functools
from collections.abc import Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import device
from .call import INDICES, Call, Tensors, new_rows, with_copies
from .check import memory, offsets, pages
from .features import INDEX_DTYPES
from .overlap import overlap, overlaps_itself
from .problem import accumulation_dtype

MOST_DISTANCES = 256  # between caches of one layout
EXAMPLE = (
    "flashtile.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, k=k, v=v, causal=True) with "
    "q [2, 8, 1, 64], k_cache, v_cache [2, 4, 512, 64], k, v [2, 4, 1, 64] and lengths int32 [2]"
)


class CacheTensors(NamedTuple):
    """The tensors of a KV-cache call; those that modify scores are in `Tensors`, as for every call."""

    k_cache: Tensor  # [B_cache, Hkv, S_max, D], or pages [num_pages, page_size, Hkv, D]
    v_cache: Tensor
    cache_seqlens: Tensor  # int32, [B]
    page_table: Tensor | None = None  # int32, [B, max_pages]
    cache_batch_idx: Tensor | None = None  # int32, [B]; rows of a dense cache, or of the page table
    leftpad_k: Tensor | None = None  # int32, [B]
    rotary_start: Tensor | None = None  # int32, [B]
    cu_seqlens_k_new: Tensor | None = None  # int32, [B + 1]; iff new keys are packed otherwise than q
    k: Tensor | None = None  # to append: [B, Hkv, S_new, D], or packed like q [T, Hkv, D]
    v: Tensor | None = None
    rotary_cos: Tensor | None = None  # [S_rotary, rotary_dim / 2]
    rotary_sin: Tensor | None = None


CACHE_INDICES = slice(CacheTensors._fields.index("cache_seqlens"), CacheTensors._fields.index("cu_seqlens_k_new") + 1)
CACHE_REQUIRED = ("k_cache", "v_cache", "cache_seqlens")


class RotarySettings(NamedTuple):
    """The scalars of rotary positions."""

    interleaved: bool = True  # pairs are features (0, 1), (2, 3), ...
    q_fixed: bool = False  # all queries of a sequence turn as its first one


class NewTokens(NamedTuple):
    """Tokens of the queries and their keys in order: sequence, and position among the sequence's new tokens."""

    sequence: Tensor  # [T]
    place: Tensor  # [T], 0 for the sequence's first token in this call
    exists: Tensor  # bool [T]


class CacheCall(Call):
    """A call with a KV cache: its `tensors` are q, `cu_seqlens_q` and the features, its k and v the caches."""

    __slots__ = ("_attention", "cache", "rotary")
    kind = "attend_with_cache"

    def __init__(self, call: Call, cache: CacheTensors, rotary: RotarySettings):
        super().__init__(call.tensors, call.settings, call.entry, is_plain_eager=call.is_plain_eager)
        self.cache, self.rotary = cache, rotary
        self._attention: Call | None = None

    @property
    def layout(self) -> str:
        return "paged"

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        return (*self.tensors[:-1], *self.cache, *self.tensors.score_mod_tensors)

    @property
    def key(self) -> Hashable:
        return self.kind, self.settings, self.rotary

    def with_own_indices(self) -> "CacheCall":
        """As `Call.with_own_indices`, of the cache's indices too."""
        if not device.host_readable(self.tensors.q):
            return self
        tensors = with_copies(self.tensors, INDICES)
        call = Call(tensors, self.settings, self.entry, is_plain_eager=self.is_plain_eager)
        return CacheCall(call, with_copies(self.cache, CACHE_INDICES), self.rotary)

    def attention(self) -> Call:
        """The attention over what the caches hold once the new tokens are appended; appends nothing yet."""
        if self._attention is None:
            self._attention = paged_call(self, self.cache)
        return self._attention


def paged_call(call: Call, cache: CacheTensors) -> Call:
    """`CacheCall.attention`."""
    features, entry = call.tensors, call.entry
    settings = None if entry is None else entry.paged
    if settings is None:
        check_cache(cache, features)
        if cache.k is not None:
            check_apart(call, cache)
    k_pages, v_pages, table = as_pages(cache, cache.cache_seqlens.shape[0])
    if settings is None:
        settings = call.settings._replace(max_seqlen_k=table.shape[1] * k_pages.shape[1])
        if entry is not None:
            entry.paged = settings
    total = cache.cache_seqlens  # [B]
    if cache.k is not None:
        total = total.long() + appended(cache, features)  # which might not fit into 32 bits
    if device.host_readable(features.q):
        check_values(cache, features, table, k_pages, total)
    tensors = features._replace(k=k_pages, v=v_pages, seqused_k=total, page_table=table, leftpad_k=cache.leftpad_k)
    return Call(tensors, settings, is_plain_eager=call.is_plain_eager)


def append_and_rotate(cache_call: CacheCall) -> Call:
    """Write the new keys and values into the caches, in place, and turn the queries to their positions: what remains is
    the attention over pages.
    """
    call, cache, rotary = cache_call.attention(), cache_call.cache, cache_call.rotary
    t = call.tensors
    batch = cache.cache_seqlens.shape[0]
    if batch == 0:  # packed tensors may still have tokens: of no sequence
        return call
    if cache.k is not None and cache.v is not None:
        tokens = new_tokens(cache.k, new_offsets(cache, t), batch)
        position = held(cache)[tokens.sequence] + tokens.place  # [T]
        turn = position if cache.rotary_start is None else cache.rotary_start[tokens.sequence] + tokens.place
        k = rotated(cache.k, turn, cache, rotary)
        assert t.page_table is not None
        append(t.k, t.v, tokens_of(k), tokens_of(cache.v), t.page_table, tokens, position)
    if cache.rotary_cos is None:
        return call
    tokens = new_tokens(t.q, t.cu_seqlens_q, batch)
    first = cache.rotary_start  # [B]
    if first is None:  # the queries are the last tokens of their sequence
        first = held(cache) + appended(cache, t) - count(t.q, t.cu_seqlens_q)
    place = torch.zeros_like(tokens.place) if rotary.q_fixed else tokens.place
    turned = rotated(t.q, first[tokens.sequence] + place, cache, rotary)
    q = new_rows(t.q, t.q.shape[1], t.q.shape[-1], t.q.dtype).copy_(turned)  # the result follows q's order in memory
    return call._replace(tensors=t._replace(q=q))


def held(cache: CacheTensors) -> Tensor:
    """Keys of each sequence before this call, `[B]`."""
    return cache.cache_seqlens.long().clamp(min=0)


def appended(cache: CacheTensors, features: Tensors) -> int | Tensor:
    """Keys that this call adds to each sequence; an int, or `[B]`."""
    return 0 if cache.k is None else count(cache.k, new_offsets(cache, features))


def new_offsets(cache: CacheTensors, features: Tensors) -> Tensor | None:
    """The offsets of packed new keys; `None` if each sequence has as many."""
    if cache.k is None or cache.k.dim() == 4:
        return None
    return features.cu_seqlens_q if cache.cu_seqlens_k_new is None else cache.cu_seqlens_k_new


def as_pages(cache: CacheTensors, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pages `[num_pages, page_size, Hkv, D]` of k and v as views, and the page table `[B, max_pages]`."""
    if cache.page_table is not None:
        table, rows = cache.page_table, cache.cache_batch_idx
        return cache.k_cache, cache.v_cache, table if rows is None else rows_of_table(table, rows)
    rows = cache.cache_batch_idx
    table = rows_in_order(batch, cache.k_cache.device) if rows is None else rows[:, None]
    return cache.k_cache.transpose(1, 2), cache.v_cache.transpose(1, 2), table


def rows_of_table(table: Tensor, rows: Tensor) -> Tensor:
    """The rows `rows [B]` of a page table; -1, which is no page, for those that it does not have."""
    if table.shape[0] == 0:
        return table.new_full((rows.shape[0], table.shape[1]), -1)
    exists = (rows >= 0) & (rows < table.shape[0])
    return torch.where(exists[:, None], table[rows.clamp(0, table.shape[0] - 1)], -1)


def rows_in_order(batch: int, device: torch.device) -> Tensor:
    """`0 .. batch - 1`, int32 `[B, 1]`. Made once, unless that would be in the memory of a graph under capture."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(batch, device=device, dtype=torch.int32)[:, None]
    return _rows_in_order(batch, device)


@functools.lru_cache(maxsize=64)
def _rows_in_order(batch: int, device: torch.device) -> Tensor:
    return torch.arange(batch, device=device, dtype=torch.int32)[:, None]


def new_tokens(x: Tensor, cu_seqlens: Tensor | None, batch: int) -> NewTokens:
    """Which sequence each token of `x` belongs to; dense `[B, H, S, D]` in the order of `tokens_of`."""
    if cu_seqlens is None:
        seqlen = x.shape[2]
        token = torch.arange(batch * seqlen, device=x.device)
        return NewTokens(token // max(seqlen, 1), token % max(seqlen, 1), torch.ones_like(token, dtype=torch.bool))
    token = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    exists = sequence < batch
    sequence = sequence.clamp(max=max(batch - 1, 0))
    return NewTokens(sequence, token - cu_seqlens[sequence], exists)


def tokens_of(x: Tensor) -> Tensor:
    """`[B, H, S, D]` as `[B * S, H, D]`; packed tensors as they are."""
    return x.transpose(1, 2).flatten(0, 1) if x.dim() == 4 else x


def count(x: Tensor, cu_seqlens: Tensor | None) -> int | Tensor:
    """Tokens of each sequence in `x`."""
    return x.shape[2] if cu_seqlens is None else (cu_seqlens[1:] - cu_seqlens[:-1]).long().clamp(min=0)


def rotated(x: Tensor, position: Tensor, cache: CacheTensors, rotary: RotarySettings) -> Tensor:
    """`x` with its first `rotary_dim` features turned by the angles of each token's `position [T]` (Su et al.,
    "RoFormer", section 3.2.2): pairs (0, 1), (2, 3), ... if interleaved, else feature n with n + rotary_dim / 2.
    """
    if cache.rotary_cos is None or cache.rotary_sin is None or cache.rotary_cos.shape[0] == 0:
        return x
    position = position.clamp(0, cache.rotary_cos.shape[0] - 1)
    dtype = accumulation_dtype(x.dtype)
    cos, sin = (table[position].to(dtype)[:, None] for table in (cache.rotary_cos, cache.rotary_sin))  # [T, 1, R / 2]
    tokens = tokens_of(x)  # [T, H, D]
    half = cos.shape[-1]
    turning, rest = tokens[..., : 2 * half].to(dtype), tokens[..., 2 * half :]
    a, b = (turning[..., 0::2], turning[..., 1::2]) if rotary.interleaved else turning.split(half, dim=-1)
    turned = (a * cos - b * sin, a * sin + b * cos)  # [T, H, R / 2] each
    joined = torch.stack(turned, dim=-1).flatten(-2) if rotary.interleaved else torch.cat(turned, dim=-1)
    result = torch.cat((joined.to(x.dtype), rest), dim=-1)  # [T, H, D]
    return result if x.dim() == 3 else result.unflatten(0, (x.shape[0], x.shape[2])).transpose(1, 2)


def append(
    k_pages: Tensor, v_pages: Tensor, k: Tensor, v: Tensor, table: Tensor, tokens: NewTokens, position: Tensor
) -> None:
    """Write tokens `k [T, Hkv, D]`, `v [T, Hkv, Dv]` at their positions. What has no place in the cache is dropped:
    its write becomes a second copy of one that has a place, or of what stands there already.
    """
    num_pages, page_size = k_pages.shape[:2]
    if k.shape[0] == 0 or num_pages == 0 or table.numel() == 0:
        return
    column = position // page_size
    page = table[tokens.sequence, column.clamp(0, table.shape[1] - 1)].long()
    fits = tokens.exists & (column < table.shape[1]) & (page >= 0) & (page < num_pages)
    page, slot = page.clamp(0, num_pages - 1), position % page_size
    substitute = fits.int().argmax(dim=0, keepdim=True)  # [1] the first token that fits, if any does, else token 0
    page, slot = (torch.where(fits, x, x[substitute]) for x in (page, slot))
    for cache, new in ((k_pages, k), (v_pages, v)):
        other = torch.where(fits.any(), new[substitute], cache[page[:1], slot[:1]])  # [1, Hkv, D]
        cache.index_put_((page, slot), torch.where(fits[:, None, None], new, other))


def check_values(cache: CacheTensors, features: Tensors, table: Tensor, k_pages: Tensor, total: Tensor) -> None:
    """The values of index tensors on a CPU: everything that is read or written lies inside the cache."""
    capacity = table.shape[1] * k_pages.shape[1]
    if cache.cu_seqlens_k_new is not None and cache.k is not None:
        offsets("cu_seqlens_k_new", cache.cu_seqlens_k_new, cache.k.shape[0], None, EXAMPLE)
    lengths = total.tolist()
    for b, n in enumerate(cache.cache_seqlens.tolist()):
        if not 0 <= n <= capacity:
            accepted = f"0 to {capacity}, the room in the cache, at sequence {b}, which has {n}"
            raise ArgumentError("cache_seqlens", cache.cache_seqlens, accepted, EXAMPLE)
    for b, n in enumerate(lengths):
        if n > capacity:
            what = "page_table" if cache.page_table is not None else "k_cache"
            given = cache.page_table if cache.page_table is not None else cache.k_cache
            accepted = f"room for the {n} keys of sequence {b} (cache_seqlens and what is appended); it has {capacity}"
            raise ArgumentError(what, given, accepted, EXAMPLE)
    if cache.cache_batch_idx is not None:
        rows = cache.cache_batch_idx.tolist()
        name, of = ("k_cache", cache.k_cache) if cache.page_table is None else ("page_table", cache.page_table)
        if any(not 0 <= row < of.shape[0] for row in rows):
            accepted = f"rows of {name}, 0 to {of.shape[0] - 1}"
            raise ArgumentError("cache_batch_idx", cache.cache_batch_idx, accepted, EXAMPLE)
        if cache.k is not None and len(set(rows)) < len(rows):
            raise ArgumentError("cache_batch_idx", cache.cache_batch_idx, "different rows, when appending", EXAMPLE)
    pages(table, lengths, k_pages.shape[0], k_pages.shape[1], EXAMPLE)
    if cache.leftpad_k is not None:
        for b, (pad, n) in enumerate(zip(cache.leftpad_k.tolist(), lengths, strict=True)):
            if not 0 <= pad <= n:
                accepted = f"0 to {n} at sequence {b}, which has {pad}"
                raise ArgumentError("leftpad_k", cache.leftpad_k, accepted, EXAMPLE)
    check_positions(cache, features, lengths)


def check_positions(cache: CacheTensors, features: Tensors, lengths: list[int]) -> None:
    """Whether the rotary tables have a row for each position, on a CPU."""
    if cache.rotary_cos is None:
        return
    ends = lengths
    if cache.rotary_start is not None:
        counts = [torch.as_tensor(appended(cache, features)), torch.as_tensor(count(features.q, features.cu_seqlens_q))]
        ends = (cache.rotary_start.long() + torch.maximum(*counts)).tolist()
        for b, start in enumerate(cache.rotary_start.tolist()):
            if start < 0:
                accepted = f"positions from 0; that of sequence {b} is {start}"
                raise ArgumentError("rotary_start", cache.rotary_start, accepted, EXAMPLE)
    if max(ends, default=0) > cache.rotary_cos.shape[0]:
        accepted = f"at least {max(ends)} positions, for the longest sequence"
        raise ArgumentError("rotary_cos", cache.rotary_cos, accepted, EXAMPLE)


def check_apart(call: Call, cache: CacheTensors) -> None:
    """Whether new keys and values can be written without changing others."""
    k, v = cache.k_cache, cache.v_cache
    apart: set[int] = set() if call.entry is None else call.entry.apart
    distance = v.data_ptr() - k.data_ptr()
    if distance in apart:
        return
    for name, x in (("k_cache", k), ("v_cache", v)):
        if overlaps_itself(x):
            accepted = f"a cache of which no two elements share memory, when appending; its strides are {x.stride()}"
            raise ArgumentError(name, x, accepted, EXAMPLE)
    if overlap(k, v):
        accepted = "a cache that shares no element with k_cache, when appending; both may be parts of one tensor"
        raise ArgumentError("v_cache", v, accepted, EXAMPLE)
    if len(apart) >= MOST_DISTANCES:
        apart.clear()
    apart.add(distance)


def check_cache(cache: CacheTensors, features: Tensors) -> None:
    """Shapes, dtypes and devices of what only a KV-cache call has; the rest is checked as for every call."""
    q = features.q
    memory({"q": q} | cache._asdict(), "paged")

    def fail(argument: str, accepted: str) -> None:
        raise ArgumentError(argument, getattr(cache, argument), accepted, EXAMPLE)

    if q.dim() != (4 if features.cu_seqlens_q is None else 3):
        shape = "[B, Hq, Sq, D]; packed [Tq, Hq, D] with cu_seqlens_q"
        raise ArgumentError("q", q, shape, EXAMPLE)
    batch = q.shape[0] if features.cu_seqlens_q is None else max(features.cu_seqlens_q.numel() - 1, 0)
    paged = cache.page_table is not None
    layout = "[num_pages, page_size, Hkv, {}]" if paged else "[B_cache, Hkv, S_max, {}]"
    for name, x, dim in (("k_cache", cache.k_cache, "D"), ("v_cache", cache.v_cache, "Dv")):
        if x.dim() != 4 or x.shape[:3] != cache.k_cache.shape[:3]:
            fail(name, f"{layout.format(dim)}, alike for k and v")
        if x.dtype != q.dtype:
            fail(name, f"the dtype of q, {q.dtype}")
    if cache.k_cache.shape[1 if paged else 2] == 0:
        fail("k_cache", f"{layout.format('D')} with room for at least one key")
    if cache.k_cache.shape[-1] != q.shape[-1]:
        fail("k_cache", f"the head dimension of q, {q.shape[-1]}")
    heads_kv = cache.k_cache.shape[2 if paged else 1]
    if heads_kv == 0 or q.shape[1] % heads_kv != 0:
        fail("k_cache", f"a number of heads in {layout.format('D')} that divides the {q.shape[1]} heads of q")
    rows = batch if cache.cache_batch_idx is None or cache.page_table is None else cache.page_table.shape[0]
    ranks = {"cache_seqlens": 1, "cache_batch_idx": 1, "leftpad_k": 1, "rotary_start": 1, "cu_seqlens_k_new": 1}
    first = {"page_table": rows, "cu_seqlens_k_new": batch + 1}
    for name, rank in (ranks | {"page_table": 2}).items():
        x, n = getattr(cache, name), first.get(name, batch)
        if x is not None and (x.dtype not in INDEX_DTYPES or x.dim() != rank or x.shape[0] != n):
            fail(name, f"int32 (or int64), {rank} dimension{'s' * (rank > 1)}, the first {n}")
    if not paged and cache.cache_batch_idx is None and cache.k_cache.shape[0] < batch:
        fail("k_cache", f"at least {batch} rows, or cache_batch_idx")
    if (cache.k is None) != (cache.v is None):
        fail("k" if cache.k is None else "v", "both k and v, or neither")
    if cache.k is not None and cache.v is not None:
        check_appended(cache, features, heads_kv, batch)
    elif cache.cu_seqlens_k_new is not None:
        fail("cu_seqlens_k_new", "None without k and v")
    if cache.rotary_start is not None and cache.rotary_cos is None:
        fail("rotary_start", "None without rotary_cos and rotary_sin")
    if (cache.rotary_cos is None) != (cache.rotary_sin is None):
        fail("rotary_sin" if cache.rotary_sin is None else "rotary_cos", "both rotary_cos and rotary_sin, or neither")
    for name in ("rotary_cos", "rotary_sin"):
        x = getattr(cache, name)
        if x is None:
            continue
        if x.dim() != 2 or x.shape != cache.rotary_cos.shape or not 1 <= x.shape[1] <= q.shape[-1] // 2:  # type: ignore[union-attr]
            fail(name, f"[S_rotary, rotary_dim / 2] with rotary_dim at most {q.shape[-1]}, alike for cos and sin")
        if x.dtype not in (q.dtype, torch.float32):
            fail(name, f"dtype {q.dtype} or float32")


def check_appended(cache: CacheTensors, features: Tensors, heads_kv: int, batch: int) -> None:
    """New keys and values: packed by offsets of their own, or like q, or as many of each sequence."""
    k, v = cache.k, cache.v
    assert k is not None
    assert v is not None
    if cache.cu_seqlens_k_new is not None:
        leading, rank, first = "[T_new, Hkv, {}] with cu_seqlens_k_new, of", 3, k.shape[0] if k.dim() else 0
    elif features.cu_seqlens_q is not None and k.dim() != 4:
        leading, rank, first = "[Tq, Hkv, {}] (packed like q) with Tq = {},", 3, features.q.shape[0]
    else:
        leading, rank, first = "[B, Hkv, S_new, {}] with B = {},", 4, batch
    for name, x, dim, width in (("k", k, "D", cache.k_cache.shape[-1]), ("v", v, "Dv", cache.v_cache.shape[-1])):
        fits = x.dim() == rank and x.shape[0] == first and x.shape[1] == heads_kv and x.shape[-1] == width
        if not fits or x.shape[:-1] != k.shape[:-1]:
            accepted = f"{leading.format(dim, first)} Hkv = {heads_kv}, {dim} = {width}"
            raise ArgumentError(name, x, accepted, EXAMPLE)
        if x.dtype != features.q.dtype:
            raise ArgumentError(name, x, f"the dtype of q, {features.q.dtype}", EXAMPLE)
