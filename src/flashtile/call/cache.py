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

from ..persistent import persistent
from ..private_torch import is_capturing
from . import device, eight_bit, latent_rows
from .cache_tensors import CACHE_INDICES, CacheTensors, RotarySettings, appended, count, held, new_offsets
from .call import INDICES, Call, Tensors, new_rows, with_copies
from .check_cache import check_cache, check_values, check_writable
from .problem import accumulation_dtype, power_of_two


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
        check_cache(cache, features, v_dim=call.settings.v_dim)
        if cache.k is not None:
            check_writable(entry, cache.k_cache, cache.v_cache, cache.k, cache.v)
    batch = cache.cache_seqlens.shape[0]
    k_pages, v_pages, table = as_pages(cache, batch)
    if settings is None:
        settings = call.settings._replace(max_seqlen_k=table.shape[1] * k_pages.shape[1])
        if entry is not None:
            entry.paged = settings
    total = cache.cache_seqlens  # [B]
    if cache.k is not None:
        total = total.long() + appended(cache, features)  # which might not fit into 32 bits
    if device.host_readable(features.q):
        check_values(cache, features, table, k_pages, total)
    k_descale, v_descale = descales_of_pages(cache, batch)
    tensors = features._replace(
        k=k_pages, v=v_pages, seqused_k=total, page_table=table, leftpad_k=cache.leftpad_k, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
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
    if cache.k is not None:
        tokens = new_tokens(cache.k, new_offsets(cache, t), batch)
        position = held(cache)[tokens.sequence] + tokens.place  # [T]
        turn = position if cache.rotary_start is None else cache.rotary_start[tokens.sequence] + tokens.place
        k = rotated(cache.k, turn, cache, rotary)
        if cache.k_cache.dtype is torch.uint8:
            k = latent_rows.pack(k)
        v = None if cache.v is None else tokens_of(cache.v)
        append(t, tokens_of(k), v, tokens, position, writes_descales(cache))
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


def as_pages(cache: CacheTensors, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pages `[num_pages, page_size, Hkv, D]` of k and v as views, and the page table `[B, max_pages]`."""
    if cache.page_table is not None:
        table, rows = cache.page_table, cache.cache_batch_idx
        return cache.k_cache, cache.v_cache, table if rows is None else rows_of_table(table, rows)
    rows = cache.cache_batch_idx
    table = rows_in_order(batch, cache.k_cache.device) if rows is None else rows[:, None]
    return cache.k_cache.transpose(1, 2), cache.v_cache.transpose(1, 2), table


def descales_of_pages(cache: CacheTensors, batch: int) -> tuple[Tensor | None, Tensor | None]:
    """The scales of k and v as views `[B|1, num_pages|1, page_size|1, Hkv]`."""
    paged = cache.page_table is not None
    k, v = (
        None if x is None else eight_bit.scales_of_pages(x, cache.k_cache, batch, paged=paged)
        for x in (cache.k_descale, cache.v_descale)
    )
    return k, v


def writes_descales(cache: CacheTensors) -> tuple[bool, bool]:
    """Whether an append writes the scales of k and of v: they have one for each token and head."""
    k, v = (
        cache.k is not None and x is not None and eight_bit.is_by_token(x, cache.k_cache)
        for x in (cache.k_descale, cache.v_descale)
    )
    return k, v


def written_descales(cache: CacheTensors) -> list[Tensor]:
    """The scales that an append writes."""
    descales = zip((cache.k_descale, cache.v_descale), writes_descales(cache), strict=True)
    return [x for x, writes in descales if x is not None and writes]


def rows_of_table(table: Tensor, rows: Tensor) -> Tensor:
    """The rows `rows [B]` of a page table; -1, which is no page, for those that it does not have."""
    if table.shape[0] == 0:
        return table.new_full((rows.shape[0], table.shape[1]), -1)
    exists = (rows >= 0) & (rows < table.shape[0])
    return torch.where(exists[:, None], table[rows.clamp(0, table.shape[0] - 1)], -1)


def rows_in_order(batch: int, device: torch.device) -> Tensor:
    """`0 .. batch - 1`, int32 `[B, 1]`. Only a capture with no call before it launches a kernel for them each time."""
    if device.type == "cuda" and (power_of_two(batch), device) not in _numbers and is_capturing():
        return torch.arange(batch, device=device, dtype=torch.int32)[:, None]
    return _rows_in_order(batch, device)


_numbers: dict[tuple[int, torch.device], Tensor] = {}  # kept for good: captured graphs read them


@functools.lru_cache(maxsize=64)
def _rows_in_order(batch: int, device: torch.device) -> Tensor:
    count = power_of_two(batch)
    if (count, device) not in _numbers:
        made = persistent(device, lambda: torch.arange(count, device=device, dtype=torch.int32))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # a graph may run on any stream
        _numbers.setdefault((count, device), made)  # never replaced by another thread's
    return _numbers[count, device][:batch, None]


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
    pages: Tensors, k: Tensor, v: Tensor | None, tokens: NewTokens, position: Tensor, writes_descale: tuple[bool, bool]
) -> None:
    """Write tokens `k [T, Hkv, D]`, `v [T, Hkv, Dv]` at their positions in `pages`, quantized if those have 8 bits.
    Without v, values are columns of k. What has no place in the cache is dropped: its write becomes a second copy of
    one that has a place, or of what stands there already.
    """
    table = pages.page_table
    assert table is not None
    num_pages, page_size = pages.k.shape[:2]
    if k.shape[0] == 0 or num_pages == 0 or table.numel() == 0:
        return
    column = position // page_size
    page = table[tokens.sequence, column.clamp(0, table.shape[1] - 1)].long()
    fits = tokens.exists & (column < table.shape[1]) & (page >= 0) & (page < num_pages)
    page, slot = page.clamp(0, num_pages - 1), position % page_size
    substitute = fits.int().argmax(dim=0, keepdim=True)  # [1] the first token that fits, if any does, else token 0
    page, slot = (torch.where(fits, x, x[substitute]) for x in (page, slot))

    def write(cache: Tensor, new: Tensor) -> None:
        own = fits.view(-1, *[1] * (new.dim() - 1))
        other = torch.where(fits.any(), new[substitute], cache[page[:1], slot[:1]])  # [1, Hkv, D]
        cache.index_put_((page, slot), torch.where(own, new, other))

    for cache, new, descale, writes in (
        (pages.k, k, pages.k_descale, writes_descale[0]),
        (pages.v, v, pages.v_descale, writes_descale[1]),
    ):
        if new is None:
            continue
        if not eight_bit.is_eight_bit(cache):
            write(cache, new)
            continue
        scale: Tensor | float = eight_bit.number(descale, tokens.sequence, page, slot)  # [T, Hkv]
        if descale is not None and writes:
            scale = eight_bit.own_scales(new, cache.dtype)
            write(descale[0], scale)
        scale = scale[..., None] if isinstance(scale, Tensor) else scale
        write(eight_bit.bits(cache), eight_bit.bits(eight_bit.quantize(new, scale, cache.dtype)))
