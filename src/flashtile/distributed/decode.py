"""Decoding over a cache whose positions are sharded over a mesh: each rank attends to its own, one exchange merges."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..api.latent_rows import packed_cache
from ..api.merge import merge_attention
from ..api.settings import DEFAULT_ROTARY, values_of
from ..api.signatures import Causal, Lengths, WindowArgument
from ..call.cache import CacheCall
from ..call.cache_tensors import CacheTensors, held
from ..call.call import Call, new_rows
from ..call.eight_bit import bits, is_by_token, is_eight_bit, own_scales, quantize
from ..call.latent_rows import is_packed, pack
from ..call.problem import accumulation_dtype
from ..dispatch import fast_path
from ..dispatch.cache_operator import reads_copy, run_with_cache
from ..dispatch.planner import plan_call
from ..dynamo import untraced
from ..errors import ArgumentError
from .cache_inputs import EXAMPLE, Step, prepared
from .group import Grid, Group, grid_of


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *,
    mesh: DeviceMesh,
    cache_seqlens: Lengths,
    length: int | None = None,
    check: bool = False,
    k: Tensor | None = None,
    v: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_dim: int | None = None,
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
        v_cache: the same with Dv; `None` with `v_dim`.
        mesh: a `DeviceMesh` with one dimension.
        cache_seqlens: int32 or int64 `[B]`, or an int for all: keys in each sequence's whole cache before this call.
        length: positions of the whole cache. `None`: all ranks have as many, S.
        check: compare shapes, arguments and values of all ranks first, and raise on all of them where they differ. This
            waits for the device. Without it, ranks that differ end in the process group's timeout, or in wrong results.
        k, v: keys and values to append, `[B, Hkv, S_new, D]` and Dv. The ranks that hold their positions write them.
        k_descale, v_descale: scales of caches of 8 bits, float32: `[Hkv]` or `[B, Hkv]`, the same on all ranks, or this
            rank's positions `[B_cache, Hkv, S]` of one for each token and head, which are written to.
        v_dim: the values are the first so many columns of `k_cache` and of the new `k`, as in a latent cache, also in
            rows of 656 bytes; pass `scale`, whose default is for all columns of k.
        mask, bias: tensors that broadcast to `[B, Hq, Sq, length]`, with the keys of all ranks.
        alibi_slopes: `[Hq]` or `[B, Hq]`.

    The other arguments: as in `flashtile.attention_with_kvcache`.

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
    values: Any = v_cache
    if v_dim is not None:
        k_cache = packed_cache(q, k_cache, v_dim)
        found = values_of("attention_with_kvcache", k_cache, v_cache, k_descale, v_descale, v_dim)
        values, v_descale, v_dim = found
    cache = CacheTensors(
        k_cache, values, cache_seqlens, k=k, v=v, k_descale=k_descale, v_descale=v_descale  # type: ignore[arg-type]
    )  # fmt: skip
    tensors = {"q": q, "mask": mask, "bias": bias, "alibi_slopes": alibi_slopes, "sinks": sinks}
    keywords = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "num_splits": num_splits,
        "deterministic": deterministic, "backend": backend, "v_dim": v_dim,
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
    rooms = set() if call.entry is None else call.entry.rooms
    if step.layout.length not in rooms:  # the first call of this layout
        if not is_packed(step.cache.k_cache) or not reads_copy(call):
            plan_call(call)  # a backend that declines it does so before anything is written
        rooms.add(step.layout.length)
    if step.cache.k is not None:
        append(step.cache, held(step.cache) - step.piece.start)
    out, lse = merged(*run_with_cache(call), grid.outer)
    return out.to(step.call.tensors.q.dtype), lse


def call_of_rank(step: Step) -> CacheCall:
    """The call over a rank's keys, as they are once new ones have been appended. A rank without positions makes the
    same call over a cache of one position, in which there is no key: all ranks plan, or decline, alike.
    """
    t, cache = step.call.tensors, step.cache
    size, last = step.piece.length, step.layout.length - 1
    k, v = (x if size > 0 else x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (t.k, t.v))
    if step.call.settings.v_dim is not None:
        v = k[..., : v.shape[3]]
    first = min(step.piece.start, last)
    total = held(cache) + (0 if cache.k is None else cache.k.shape[2])  # [B]
    dtype = accumulation_dtype(t.q.dtype)
    mask, bias = of_pairs(step, total, first, k.shape[2])
    tensors = t._replace(
        k=k,
        v=v,
        mask=mask,
        bias=bias,
        alibi_slopes=None,
        sinks=t.sinks if step.rank == 0 else None,  # which has the first position of any cache
        # Parts are rounded once they are merged.
        out=None if t.q.dtype == dtype else new_rows(t.q, t.q.shape[1], v.shape[3], dtype),
    )
    settings = step.call.settings._replace(window_left=None, window_right=None)
    lengths = (total - step.piece.start).clamp(0, size).to(torch.int32)
    descales = [
        x.new_ones(*x.shape[:2], 1) if size == 0 and x is not None and is_by_token(x, cache.k_cache) else x
        for x in (cache.k_descale, cache.v_descale)
    ]
    call = Call(tensors, settings, is_plain_eager=step.call.is_plain_eager)
    of_rank = CacheTensors(k, v, lengths, k_descale=descales[0], v_descale=descales[1])
    return CacheCall(call, of_rank, DEFAULT_ROTARY)


def append(cache: CacheTensors, start: Tensor) -> None:
    """Write the rows of the new keys and values `[B, H, S_new, D]` into the caches `[B_cache, H, S, D]` whose
    positions, from `start [B]` on, exist in them, quantized if these have 8 bits. No two elements that are written have
    one place.
    """
    assert cache.k is not None
    count, size, device = cache.k.shape[2], cache.k_cache.shape[2], start.device
    width = min(count, size)
    if width == 0:
        return
    row = torch.arange(start.shape[0], device=device)[:, None]
    place = start.clamp(0, size - width)[:, None]  # [B, width]
    if width > 1:
        place = place + torch.arange(width, device=device)
    source = place - start[:, None]
    exists = source == 0 if count == 1 else (source >= 0) & (source < count)
    source = source.clamp(0, count - 1)

    def write(old: Tensor, new: Tensor) -> None:
        """Write `new [B, H, S_new, ...]` into `old [B_cache, H, S, ...]`."""
        old, new = old[: new.shape[0]].transpose(1, 2), new.transpose(1, 2)  # [B, S, H, ...]
        chosen = new if count == 1 else new[row, source]
        own = exists.view(*exists.shape, *[1] * (new.dim() - 2))
        # Not `scatter_`, which on a CPU takes time in proportion to the cache.
        old.index_put_((row, place), torch.where(own, chosen, old[row, place]))

    for old, new, descale in (
        (cache.k_cache, cache.k, cache.k_descale),
        (cache.v_cache, cache.v, cache.v_descale),
    ):
        if new is None:  # values are columns of the keys
            continue
        if not is_eight_bit(old):
            write(old, pack(new) if is_packed(old) else new)
            continue
        scale: Tensor | float = 1.0
        if descale is not None and is_by_token(descale, old):
            scale = own_scales(new, old.dtype)
            write(descale, scale)
            scale = scale[..., None]
        elif descale is not None:
            scale = descale.reshape(-1, new.shape[1], 1, 1)  # [B|1, H, 1, 1]
        write(bits(old), bits(quantize(new, scale, old.dtype)))


def of_pairs(step: Step, total: Tensor, first: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    """The mask and the bias of a rank's `size` keys from `first` on, with the window and slopes of the whole sequence.
    Each row has `total [B]` keys of it.
    """
    t, sides, num_rows = step.call.tensors, step.call.settings.window, step.call.tensors.q.shape[2]
    mask, bias = (own_keys(x, first, size) for x in (t.mask, t.bias))
    # The last row sees all keys that exist, if no side is left of it.
    right = sides.right if sides.right is not None and (num_rows > 1 or sides.right < 0) else None
    if sides.left is None and right is None and t.alibi_slopes is None:
        return mask, bias
    last = total[:, None, None] - num_rows + torch.arange(num_rows, device=total.device)[:, None]
    distances = (last - torch.arange(first, first + size, device=total.device))[:, None]  # [B, 1, Sq, S]
    if sides.left is not None:
        near = distances <= sides.left
        mask = near if mask is None else mask & near
    if right is not None:
        reached = distances >= -right
        mask = reached if mask is None else mask & reached
    if t.alibi_slopes is not None:
        alibi = -t.alibi_slopes.to(accumulation_dtype(t.q.dtype))[..., :, None, None] * distances.abs()
        bias = alibi if bias is None else alibi + bias
    return mask, bias


def own_keys(x: Tensor | None, first: int, size: int) -> Tensor | None:
    """A rank's keys of a mask or bias."""
    return x if x is None or x.shape[3] == 1 else x.narrow(3, first, size)


def merged(out: Tensor, lse: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """The result over the keys of all ranks, in the dtype of lse, merged in the order of ranks."""
    part = torch.cat([out.to(lse.dtype), lse[..., None]], dim=-1)
    if part.numel() == 0:
        return part[..., :-1], lse
    parts = group.gather_tensors(part).wait()
    return merge_attention([x[..., :-1] for x in parts], [x[..., -1] for x in parts])
