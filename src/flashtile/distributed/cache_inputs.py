"""The inputs of a decoding step: checked as one device's are, against the room in the caches of all ranks."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..api.normalize import lengths_of, normalize
from ..api.settings import DEFAULT_ROTARY
from ..call import check, device
from ..call.cache import CacheCall, as_pages
from ..call.cache_tensors import CACHE_INDICES, CacheTensors, appended
from ..call.call import Call, with_copies
from ..call.check_cache import check_cache, check_descales, check_values, check_writable
from ..call.problem import Problem
from ..call.sharding import is_dtensor
from ..dispatch import fast_path
from ..dispatch.cache_operator import refuse_derivatives
from ..errors import ArgumentError, AttentionError
from .agreement import Description, agree
from .group import Grid
from .layout import Layout, Piece, layout_of

EXAMPLE = "flashtile.distributed.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, mesh=mesh)"


class Step(NamedTuple):
    """A checked decoding step. Tensors of pairs have the keys of all ranks."""

    call: Call  # its k and v are this rank's caches
    cache: CacheTensors  # this rank's
    layout: Layout  # layout of the whole cache
    rank: int

    @property
    def piece(self) -> Piece:
        """This rank's positions in the whole cache."""
        return self.layout.pieces(self.rank)[0]


def prepared(
    tensors: dict[str, Any], cache: CacheTensors, keywords: dict[str, Any], grid: Grid, length: int | None, asked: bool
) -> Step:
    """Check a step on this rank and, if that is asked for, with the other ranks. Nothing has been written yet."""
    sizes, described = None, ""
    try:
        call, cache = normalized(tensors, cache, keywords)
    except AttentionError as error:
        if not asked:
            raise
        described = str(error)
    if asked:
        _, sizes = agree(grid, described or Description.of_step(call, cache, length))
    layout = layout_of_cache(cache.k_cache, grid, length, sizes)
    check_against_room(call, cache, layout.length)
    return Step(call, cache, layout, grid.rank)


def normalized(tensors: dict[str, Any], cache: CacheTensors, keywords: dict[str, Any]) -> tuple[Call, CacheTensors]:
    """The call over this rank's caches, with all that can be checked without the size of the whole cache."""
    for name, x in (*tensors.items(), *cache._asdict().items()):
        if is_dtensor(x):
            raise ArgumentError(name, x, "a tensor of this rank, no DTensor: `x.to_local()`", EXAMPLE)
    if tensors["mask"] is not None and not isinstance(tensors["mask"], Tensor):
        raise ArgumentError("mask", tensors["mask"], "a bool tensor, with the keys of all ranks", EXAMPLE)
    if not isinstance(cache.cache_seqlens, Tensor):
        cache = cache._replace(cache_seqlens=lengths_of("cache_seqlens", cache.cache_seqlens, tensors["q"], None))
    call = normalize(
        "attention_with_kvcache", tensors | {"k": cache.k_cache, "v": cache.v_cache}, score_mod=None, dropout_p=0.0,
        dropout_seed=None, cache=cache, **keywords,
    )  # fmt: skip
    if call.settings.top_left:
        raise ArgumentError("causal", "top_left", "True or False", EXAMPLE)
    refuse_derivatives(call.tensors[:-1], cache)
    check.memory(cache._asdict(), "paged")
    call.entry = fast_path.find_call(CacheCall(call, cache, DEFAULT_ROTARY))
    if cache.k is not None and (cache.v is None) == (call.settings.v_dim is not None):
        check_writable(call.entry, cache.k_cache, cache.v_cache, cache.k, cache.v)
    q = call.tensors.q
    if torch.is_autocast_enabled(q.device.type):
        k, v = (None if x is None else x.to(q.dtype) for x in (cache.k, cache.v))
        cache = cache._replace(k=k, v=v)
    # The lengths that are checked are those that are used, whatever another thread writes meanwhile.
    return call, with_copies(cache, CACHE_INDICES) if device.host_readable(q) else cache


def layout_of_cache(cache: Tensor, grid: Grid, length: int | None, sizes: list[int] | None) -> Layout:
    """The layout of the whole cache's positions; this rank has its own part.

    Args:
        cache: this rank's.
        grid: the ranks.
        length: positions of the whole; `None` stands for as many on each rank, or for `sizes`.
        sizes: positions of all ranks, if they have been compared.
    """
    own = cache.shape[2] if cache.dim() == 4 else 0  # other shapes are refused later, by name
    layout = layout_of("k_cache", "contiguous", own, grid.size, sum(sizes) if sizes and length is None else length)
    expected = [layout.rows(rank) for rank in range(grid.size)]
    if sizes is not None and sizes != expected:
        raise ArgumentError("k_cache", f"{sizes} positions on the ranks", f"{expected}, as `shard` cuts them", EXAMPLE)
    if cache.dim() == 4 and own != expected[grid.rank]:
        accepted = f"{expected[grid.rank]} positions on rank {grid.rank}, as `shard` cuts them of {layout.length}"
        raise ArgumentError("k_cache", cache, accepted, EXAMPLE)
    return layout


def check_against_room(call: Call, cache: CacheTensors, room: int) -> None:
    """Check the call as one device checks it over the whole cache, which is described by tensors without memory. Of a
    layout that has been checked, only values on a CPU can still be wrong.
    """
    rooms = None if call.entry is None else call.entry.rooms
    host_readable = device.host_readable(call.tensors.q)
    known = rooms is not None and room in rooms
    if known and not host_readable:
        return
    t, more = call.tensors, room - cache.k_cache.shape[2] if cache.k_cache.dim() == 4 else 0
    caches = {name: longer(getattr(cache, name), more) for name in ("k_cache", "v_cache")}
    whole = cache._replace(**caches, k_descale=None, v_descale=None)
    if not known:
        check_cache(whole, t, v_dim=call.settings.v_dim)
        check_descales(cache, t.q.shape[0], EXAMPLE)
    k, v, table = as_pages(whole, t.q.shape[0])
    total = whole.cache_seqlens.long() + appended(whole, t)
    if host_readable:
        check_values(whole, t, table, k, total)
    if not known:
        paged = t._replace(k=k, v=v, seqused_k=total, page_table=table)
        Problem.describe(Call(paged, call.settings._replace(max_seqlen_k=room)))
    if rooms is not None:
        rooms.add(room)


def longer(cache: Tensor, more: int) -> Tensor:
    """A tensor like `cache` with more positions, which share one row."""
    if cache.dim() != 4:
        return cache
    heads, width = cache.shape[:2], cache.shape[3]
    return cache.new_empty(width).expand(*heads, cache.shape[2] + more, width)
