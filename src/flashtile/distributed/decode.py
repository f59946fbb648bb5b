"""Decoding over a cache whose positions are sharded over a mesh: each rank attends to its own, one exchange merges."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..api.attention import attention_with_kvcache as attention_of_rank
from ..api.merge import merge_attention
from ..api.normalize import lengths_of, window_of
from ..api.signatures import Causal, Lengths, WindowArgument
from ..call.window import Window
from ..errors import ArgumentError
from .group import Group, grid_of

EXAMPLE = "flashtile.distributed.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, mesh=mesh)"


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    mesh: DeviceMesh,
    cache_seqlens: Lengths,
    k: Tensor | None = None,
    v: Tensor | None = None,
    causal: Causal = False,
    window: WindowArgument = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    num_splits: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a cache that is sharded by position, and attend over all of it; for inference.

    Rank r of n holds positions `r * S` to `(r + 1) * S - 1` of each sequence. All other tensors are the same on all
    ranks, and so is the result. Each rank attends to the keys that it has; one all-gather of
    `B * Hq * Sq * (Dv + 1)` float32 numbers a rank and `merge_attention` make the whole. Nothing waits for the device,
    and a step can be captured in a CUDA graph where the process group can. In half precision the parts are rounded
    before they are merged.

    Example:
        >>> k_cache, v_cache = (torch.zeros(2, 8, 2**18, 128) for _ in range(2))  # doctest: +SKIP
        >>> out = flashtile.distributed.attention_with_kvcache(  # doctest: +SKIP
        ...     q, k_cache, v_cache, mesh=mesh, cache_seqlens=lengths, k=k, v=v, causal=True
        ... )
        >>> lengths += 1  # doctest: +SKIP

    Args:
        q: queries `[B, Hq, Sq, D]`, the last tokens of their sequences.
        k_cache: this rank's positions `[B, Hkv, S, D]`, which is written to; S is the same on all ranks.
        v_cache: the same with Dv.
        mesh: a `DeviceMesh` with one dimension.
        cache_seqlens: int32 or int64 `[B]`, or an int for all: keys in each sequence's whole cache before this call.
        k, v: keys and values to append, `[B, Hkv, S_new, D]` and Dv. The ranks that hold their positions write them.
        mask, bias: tensors that broadcast to `[B, Hq, Sq, n * S]`, with the keys of all ranks.
        alibi_slopes: `[Hq]` or `[B, Hq]`.

    The other arguments are those of `flashtile.attention_with_kvcache`.

    Returns:
        `out [B, Hq, Sq, Dv]` in q's dtype; with `return_lse` also `lse [B, Hq, Sq]`.

    Raises:
        ArgumentError: an argument is not what it should be, or the caches of the ranks are too small for a mask or
            bias.
        AttentionError: a tensor requires a gradient, or forward mode is active.
        BackendError: no backend takes a rank's call, or the named one does not.
    """
    grid = grid_of(mesh)
    if grid.inner.size > 1 or mesh.ndim != 1:
        raise ArgumentError("mesh", mesh, "a DeviceMesh with one dimension", EXAMPLE)
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise ArgumentError(name, x, "a tensor [B, H, S, D]", EXAMPLE)
    if (k is None) != (v is None):
        raise ArgumentError("v" if v is None else "k", None, "new keys and new values, or neither", EXAMPLE)
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = lengths_of("cache_seqlens", cache_seqlens, q, None)
    group, size = grid.outer, k_cache.shape[2]
    first, before = group.rank * size, cache_seqlens.long()
    total = before if k is None else before + k.shape[2]
    if k is not None and v is not None:
        append(k_cache, k, before - first)
        append(v_cache, v, before - first)
    distances = total[:, None, None] - (q.shape[2] - torch.arange(q.shape[2], device=q.device)[:, None])
    distances = (distances - torch.arange(first, first + size, device=q.device))[:, None]  # [B, 1, Sq, S]
    sides = window_of("attention_with_kvcache", causal, window)
    pairs: dict[str, Any] = {
        "mask": visible(distances, sides, q.shape[2], own_keys("mask", mask, group, size)),
        "bias": with_alibi(distances, alibi_slopes, own_keys("bias", bias, group, size)),
    }
    out, lse = attention_of_rank(
        q, k_cache, v_cache,
        cache_seqlens=(total - first).clamp(0, size).to(torch.int32), scale=scale, softcap=softcap,
        sinks=sinks if group.rank == 0 else None, return_lse=True, num_splits=num_splits, deterministic=deterministic,
        backend=backend, **pairs,
    )  # fmt: skip
    out, lse = merged(out, lse, group)
    return (out, lse) if return_lse else out


def append(cache: Tensor, new: Tensor, start: Tensor) -> None:
    """Write those of `new [B, H, S_new, D]` into `cache [B, H, S, D]` whose positions, from `start [B]` on, exist in
    it. No two elements that are written have one place.
    """
    count, size = new.shape[2], cache.shape[2]
    width = min(count, size)
    if width == 0:
        return
    place = start.clamp(0, size - width)[:, None] + torch.arange(width, device=cache.device)  # [B, width]
    source = place - start[:, None]
    given = ((source >= 0) & (source < count))[:, None, :, None]
    shape = (*cache.shape[:2], width, cache.shape[3])
    place = place[:, None, :, None].expand(shape)
    source = source.clamp(0, count - 1)[:, None, :, None].expand(shape)
    cache.scatter_(2, place, torch.where(given, new.gather(2, source), cache.gather(2, place)))


def own_keys(name: str, x: Tensor | None, group: Group, size: int) -> Tensor | None:
    """This rank's keys of a mask or bias."""
    if x is None or (isinstance(x, Tensor) and x.dim() == 4 and x.shape[3] == 1):
        return x
    if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[3] != group.size * size:
        raise ArgumentError(name, x, f"a tensor [B, Hq, Sq, {group.size * size}], with the keys of all ranks", EXAMPLE)
    return x.narrow(3, group.rank * size, size)


def visible(distances: Tensor, sides: Window, num_rows: int, mask: Tensor | None) -> Tensor | None:
    """The mask of a rank's keys with the window's sides, which count from the end of the whole sequence. The last row
    sees all keys that exist, if no side is left of it.
    """
    if sides.left is not None:
        near = distances <= sides.left
        mask = near if mask is None else mask & near
    if sides.right is not None and (num_rows > 1 or sides.right < 0):
        reached = distances >= -sides.right
        mask = reached if mask is None else mask & reached
    if sides.top_left:
        raise ArgumentError("causal", "top_left", "True or False", EXAMPLE)
    return mask


def with_alibi(distances: Tensor, slopes: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The bias of a rank's keys with that of their distances in the whole sequence."""
    if slopes is None:
        return bias
    if not isinstance(slopes, Tensor) or slopes.dim() not in (1, 2):
        raise ArgumentError("alibi_slopes", slopes, "a tensor [Hq] or [B, Hq]", EXAMPLE)
    alibi = -slopes[..., :, None, None] * distances.abs()
    return alibi if bias is None else alibi + bias


def merged(out: Tensor, lse: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The result over the keys of all ranks, merged in the order of ranks."""
    parts = group.gather_tensors(torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)).wait()
    whole, lse = merge_attention([x[..., :-1] for x in parts], [x[..., -1] for x in parts])
    return whole.to(out.dtype), lse
