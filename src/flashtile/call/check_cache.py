"""Every test of what only a KV-cache call has: shapes, dtypes, devices, memory and, on a CPU, the values of indices."""

from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError
from . import latent_rows
from .cache_tensors import EXAMPLE, CacheTensors, appended, count
from .call import Tensors
from .check import descale, memory, offsets, pages
from .eight_bit import DESCALES, DTYPES_IN_WORDS, OUT_DTYPES, is_by_token, is_eight_bit
from .features import INDEX_DTYPES
from .overlap import apart, overlap, overlaps_itself
from .written import is_frozen

MOST_DISTANCES = 256  # between the tensors of one layout


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


def check_writable(entry: Any, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Whether `k` and `v` can be written into the caches without changing others, or themselves. Without `v`, values
    are columns of k_cache. The entry of the call, or `None`, has distances between tensors of these layouts that do not
    overlap.
    """
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if is_frozen(x):
            accepted = "a tensor made outside of torch.inference_mode(), when appending; or a call inside it"
            raise ArgumentError(name, x, accepted, EXAMPLE)
    known: set[tuple[int, ...]] = set() if entry is None else entry.apart
    place = k_cache.data_ptr()
    between = v_cache.data_ptr() - place
    distances = between, k.data_ptr() - place, 0 if v is None else v.data_ptr() - place
    if distances in known:
        return
    if (between,) not in known:
        check_caches_apart(k_cache, None if v is None else v_cache)
    for name, new in (("k", k), ("v", v)):
        for cache in (k_cache, v_cache):
            if new is not None and not apart(new, cache) and overlap(new, cache):
                accepted = "new tokens that share no element with a cache; `.clone()` of them"
                raise ArgumentError(name, new, accepted, EXAMPLE)
    if len(known) >= MOST_DISTANCES:
        known.clear()
    known.update(((between,), distances))


def check_caches_apart(k_cache: Tensor, v_cache: Tensor | None) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x is not None and overlaps_itself(x):
            accepted = f"a cache of which no two elements share memory, when appending; its strides are {x.stride()}"
            raise ArgumentError(name, x, accepted, EXAMPLE)
    if v_cache is not None and overlap(k_cache, v_cache):
        accepted = "a cache that shares no element with k_cache, when appending; both may be parts of one tensor"
        raise ArgumentError("v_cache", v_cache, accepted, EXAMPLE)


def check_cache(cache: CacheTensors, features: Tensors, *, v_dim: int | None = None) -> None:
    """Shapes, dtypes and devices of what only a KV-cache call has; the rest is checked as for every call. With `v_dim`,
    values are columns of the keys.
    """
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
    packed = v_dim is not None and latent_rows.is_packed(cache.k_cache)
    for name, x, dim in (("k_cache", cache.k_cache, "D"), ("v_cache", cache.v_cache, "Dv")):
        if x.dim() != 4 or x.shape[:3] != cache.k_cache.shape[:3]:
            fail(name, f"{layout.format(dim)}, alike for k and v")
        if packed:
            continue
        if x.dtype != q.dtype and not is_eight_bit(cache.k_cache):
            fail(name, f"the dtype of q, {q.dtype}, or one of 8 bits: {DTYPES_IN_WORDS}")
        if x.dtype != cache.k_cache.dtype:
            fail(name, f"the dtype of k_cache, {cache.k_cache.dtype}")
    if cache.k_cache.shape[1 if paged else 2] == 0:
        fail("k_cache", f"{layout.format('D')} with room for at least one key")
    widths = cache.k_cache.shape[-1], q.shape[-1], v_dim
    if packed and (widths != latent_rows.WIDTHS or cache.k_cache.stride(-1) != 1):
        fail("k_cache", latent_rows.IN_WORDS)
    if packed and is_eight_bit(q):
        raise ArgumentError("q", q, "16 bits or more over rows of 656 bytes", EXAMPLE)
    if not packed and widths[0] != widths[1]:
        fail("k_cache", f"the head dimension of q, {q.shape[-1]}")
    heads_kv = cache.k_cache.shape[2 if paged else 1]
    if heads_kv == 0 or q.shape[1] % heads_kv != 0:
        accepted = f"a number of heads in {layout.format('D')} that divides the {q.shape[1]} heads of q"
        fail("k_cache", accepted + "; k_cache.transpose(1, 2) of [B_cache, S_max, Hkv, D]" * (not paged))
    rows = batch if cache.cache_batch_idx is None or cache.page_table is None else cache.page_table.shape[0]
    ranks = {"cache_seqlens": 1, "cache_batch_idx": 1, "leftpad_k": 1, "rotary_start": 1, "cu_seqlens_k_new": 1}
    first = {"page_table": rows, "cu_seqlens_k_new": batch + 1}
    for name, rank in (ranks | {"page_table": 2}).items():
        x, n = getattr(cache, name), first.get(name, batch)
        if x is not None and (x.dtype not in INDEX_DTYPES or x.dim() != rank or x.shape[0] != n):
            fail(name, f"int32 (or int64), {rank} dimension{'s' * (rank > 1)}, the first {n}")
    if not paged and cache.cache_batch_idx is None and cache.k_cache.shape[0] < batch:
        fail("k_cache", f"at least {batch} rows, or cache_batch_idx")
    check_descales(cache, batch)
    if v_dim is not None and cache.v is not None:
        fail("v", "None with v_dim: the new values are columns of k")
    if v_dim is None and (cache.k is None) != (cache.v is None):
        fail("k" if cache.k is None else "v", "both k and v, or neither")
    if cache.k is not None:
        check_appended(cache, features, heads_kv, batch)
    elif cache.cu_seqlens_k_new is not None:
        fail("cu_seqlens_k_new", "None without k and v")
    if cache.rotary_cos is not None and is_eight_bit(q):
        fail("rotary_cos", "None with queries of 8 bits: turn q and k before they are quantized")
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


def check_descales(cache: CacheTensors, batch: int, example: str = EXAMPLE) -> None:
    """Check the scales of 8-bit caches, and whether an append can write them."""
    for name in DESCALES:
        if (x := getattr(cache, name)) is not None:
            descale(name, x, cache.k_cache, batch, paged=cache.page_table is not None, example=example)
            if cache.k is not None and is_by_token(x, cache.k_cache):
                check_written_descale(name, x)


def check_written_descale(name: str, x: Tensor) -> None:
    """Whether the scales of new tokens can be written."""
    if is_frozen(x):
        accepted = "a tensor made outside of torch.inference_mode(), when appending; or a call inside it"
        raise ArgumentError(name, x, accepted, EXAMPLE)
    if overlaps_itself(x):
        accepted = f"scales of which no two share memory, when appending; its strides are {x.stride()}"
        raise ArgumentError(name, x, accepted, EXAMPLE)


def check_appended(cache: CacheTensors, features: Tensors, heads_kv: int, batch: int) -> None:
    """New keys and values: packed by offsets of their own, or like q, or as many of each sequence."""
    k, v = cache.k, cache.v
    assert k is not None
    if cache.cu_seqlens_k_new is not None:
        leading, rank, first = "[T_new, Hkv, {}] with cu_seqlens_k_new, of", 3, k.shape[0] if k.dim() else 0
    elif features.cu_seqlens_q is not None and k.dim() != 4:
        leading, rank, first = "[Tq, Hkv, {}] (packed like q) with Tq = {},", 3, features.q.shape[0]
    else:
        leading, rank, first = "[B, Hkv, S_new, {}] with B = {},", 4, batch
    for name, x, dim, width in (("k", k, "D", features.q.shape[-1]), ("v", v, "Dv", cache.v_cache.shape[-1])):
        if x is None:
            continue
        fits = x.dim() == rank and x.shape[0] == first and x.shape[1] == heads_kv and x.shape[-1] == width
        if not fits or x.shape[:-1] != k.shape[:-1]:
            accepted = f"{leading.format(dim, first)} Hkv = {heads_kv}, {dim} = {width}"
            raise ArgumentError(name, x, accepted, EXAMPLE)
        if is_eight_bit(features.q):
            if x.dtype not in OUT_DTYPES:
                raise ArgumentError(name, x, "bfloat16, float16 or float32, to be quantized, as q has 8 bits", EXAMPLE)
        elif x.dtype != features.q.dtype:
            raise ArgumentError(name, x, f"the dtype of q, {features.q.dtype}", EXAMPLE)
