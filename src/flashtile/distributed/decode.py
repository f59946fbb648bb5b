"""Decoding over a cache whose positions are sharded over a mesh: each rank attends to its own, one exchange merges."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..api.merge import merge_attention
from ..api.normalize import DEFAULT_ROTARY
from ..api.signatures import Causal, Lengths, WindowArgument
from ..call.cache import CacheCall
from ..call.cache_tensors import CacheTensors, held
from ..call.call import Call, new_rows
from ..call.problem import accumulation_dtype
from ..call.window import Window
from ..dispatch import fast_path
from ..dispatch.cache_operator import run_with_cache
from ..dispatch.planner import plan_call
from ..dynamo import untraced
from ..errors import ArgumentError
from .cache_inputs import EXAMPLE, Step, prepared
from .group import Grid, Group, grid_of


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    mesh: DeviceMesh,
    cache_seqlens: Lengths,
    length: int | None = None,
    check: bool = False,
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

    Each rank holds the positions of each sequence that `shard(cache, mesh, 2, length=length)` gives it; of n ranks with
    S positions each, rank r has `r * S` to `(r + 1) * S - 1`. All other tensors are the same on all ranks, and so is
    the result. Arguments mean what they mean in `flashtile.attention_with_kvcache` for the whole cache, and the same
    ones are refused, before anything is written. Each rank attends to the keys that it has; one all-gather of
    `B * Hq * Sq * (Dv + 1)` float32 numbers a rank and `merge_attention` make the whole, which is rounded to q's dtype
    at the end. On a GPU nothing waits for the device, and a step can be captured in a CUDA graph where the process
    group can.

    Example:
        >>> k_cache, v_cache = (torch.zeros(2, 8, 2**18, 128) for _ in range(2))  # doctest: +SKIP
        >>> out = flashtile.distributed.attention_with_kvcache(  # doctest: +SKIP
        ...     q, k_cache, v_cache, mesh=mesh, cache_seqlens=lengths, k=k, v=v, causal=True
        ... )
        >>> lengths += 1  # doctest: +SKIP

    Args:
        q: queries `[B, Hq, Sq, D]`, the last tokens of their sequences.
        k_cache: this rank's positions `[B_cache, Hkv, S, D]`, which are written to; S may be 0.
        v_cache: the same with Dv.
        mesh: a `DeviceMesh` with one dimension.
        cache_seqlens: int32 or int64 `[B]`, or an int for all: keys in each sequence's whole cache before this call.
        length: positions of the whole cache. `None`: all ranks have as many, S.
        check: compare shapes, arguments and values of all ranks first, and raise on all of them where they differ. This
            waits for the device. Without it, ranks that differ end in the process group's timeout, or in wrong results.
        k, v: keys and values to append, `[B, Hkv, S_new, D]` and Dv. The ranks that hold their positions write them.
        mask, bias: tensors that broadcast to `[B, Hq, Sq, length]`, with the keys of all ranks.
        alibi_slopes: `[Hq]` or `[B, Hq]`.

    The other arguments are those of `flashtile.attention_with_kvcache`.

    Returns:
        `out [B, Hq, Sq, Dv]` in q's dtype; with `return_lse` also `lse [B, Hq, Sq]`.

    Raises:
        ArgumentError: an argument is not what it should be, or the rank's caches are not its positions of `length`.
            On a CPU also lengths outside of the whole cache; on a GPU such keys do not exist and are not written.
        AttentionError: a tensor requires a gradient, or forward mode is active; with `check`, on all ranks, where one
            raises or differs from the first rank.
        BackendError: no backend takes a rank's call, or the named one does not.
        ExchangeError: another rank has ended, raised, or not come within the timeout of the process group. NCCL ends
            the process instead.
    """
    grid = grid_of(mesh)
    if mesh.ndim != 1:
        raise ArgumentError("mesh", mesh, "a DeviceMesh with one dimension", EXAMPLE)
    cache = CacheTensors(k_cache, v_cache, cache_seqlens, k=k, v=v)  # type: ignore[arg-type]
    tensors = {"q": q, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    keywords = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "num_splits": num_splits,
        "deterministic": deterministic, "backend": backend,
    }  # fmt: skip
    out, lse = run(tensors, cache, keywords, grid, length, check)
    return (out, lse) if return_lse else out


@untraced
def run(
    tensors: dict[str, Any], cache: CacheTensors, keywords: dict[str, Any], grid: Grid, length: int | None, check: bool
) -> tuple[Tensor, Tensor]:
    """`out` and `lse` over the caches of all ranks."""
    step = prepared(tensors, cache, keywords, grid, length, check)
    call = call_of_rank(step)
    call.entry = fast_path.find_call(call)
    if call.entry is None or call.entry.forward.plan is None:
        plan_call(call)  # a backend that declines it does so before anything is written
    if step.cache.k is not None and step.cache.v is not None:
        start = held(step.cache) - step.piece.start
        append(step.cache.k_cache, step.cache.k, start)
        append(step.cache.v_cache, step.cache.v, start)
    out, lse = merged(*run_with_cache(call), grid.outer)
    return out.to(step.call.tensors.q.dtype), lse


def call_of_rank(step: Step) -> CacheCall:
    """The call over a rank's keys, as they are once new ones have been appended. A rank without positions makes the
    same call over a cache of one position, in which there is no key: all ranks plan, or decline, alike.
    """
    t, cache = step.call.tensors, step.cache
    size, last = step.piece.length, step.layout.length - 1
    k, v = (x if size > 0 else x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (t.k, t.v))
    first = min(step.piece.start, last)
    total = held(cache) + (0 if cache.k is None else cache.k.shape[2])  # [B]
    num_rows, device = t.q.shape[2], t.q.device
    distances = total[:, None, None] - num_rows + torch.arange(num_rows, device=device)[:, None]
    distances = (distances - torch.arange(first, first + k.shape[2], device=device))[:, None]  # [B, 1, Sq, S]
    own_mask, own_bias = (own_keys(x, first, k.shape[2]) for x in (t.mask, t.bias))
    dtype = accumulation_dtype(t.q.dtype)
    tensors = t._replace(
        k=k,
        v=v,
        mask=visible(distances, step.call.settings.window, num_rows, own_mask),
        bias=with_alibi(distances, None if t.alibi_slopes is None else t.alibi_slopes.to(dtype), own_bias),
        alibi_slopes=None,
        sinks=t.sinks if step.rank == 0 else None,  # which has the first position of any cache
        # Parts are rounded once they are merged.
        out=None if t.q.dtype == dtype else new_rows(t.q, t.q.shape[1], v.shape[3], dtype),
    )
    settings = step.call.settings._replace(window_left=None, window_right=None)
    lengths = (total - step.piece.start).clamp(0, size).to(torch.int32)
    call = Call(tensors, settings, is_plain_eager=step.call.is_plain_eager)
    return CacheCall(call, CacheTensors(k, v, lengths), DEFAULT_ROTARY)


def append(cache: Tensor, new: Tensor, start: Tensor) -> None:
    """Write those of `new [B, H, S_new, D]` into `cache [B_cache, H, S, D]` whose positions, from `start [B]` on, exist
    in it. No two elements that are written have one place.
    """
    count, size = new.shape[2], cache.shape[2]
    width = min(count, size)
    if width == 0:
        return
    cache, new = cache[: new.shape[0]].transpose(1, 2), new.transpose(1, 2)  # [B, S, H, D]
    row = torch.arange(new.shape[0], device=cache.device)[:, None]
    place = start.clamp(0, size - width)[:, None] + torch.arange(width, device=cache.device)  # [B, width]
    source = place - start[:, None]
    given = ((source >= 0) & (source < count))[:, :, None, None]
    # Not `scatter_`, which on a CPU takes time in proportion to the cache.
    cache.index_put_((row, place), torch.where(given, new[row, source.clamp(0, count - 1)], cache[row, place]))


def own_keys(x: Tensor | None, first: int, size: int) -> Tensor | None:
    """A rank's keys of a mask or bias."""
    return x if x is None or x.shape[3] == 1 else x.narrow(3, first, size)


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
    return mask


def with_alibi(distances: Tensor, slopes: Tensor | None, bias: Tensor | None) -> Tensor | None:
    """The bias of a rank's keys with that of their distances in the whole sequence."""
    if slopes is None:
        return bias
    alibi = -slopes[..., :, None, None] * distances.abs()
    return alibi if bias is None else alibi + bias


def merged(out: Tensor, lse: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The result over the keys of all ranks, in the dtype of lse, merged in the order of ranks."""
    part = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)
    if part.numel() == 0:
        return part[..., :-1], lse
    parts = group.gather_tensors(part).wait()
    return merge_attention([x[..., :-1] for x in parts], [x[..., -1] for x in parts])
