"""A call without its values, as a JSON record, and a call like it: layouts of tensors, settings, requested gradients.

Records are what `FLASHTILE_LOG_CALLS` writes and what kernels are compiled ahead for.
"""

from typing import Any

import torch
from torch import Tensor

from .cache import CacheCall
from .cache_tensors import CacheTensors, RotarySettings
from .call import Call, Needs, Settings, Tensors
from .memory import address

ALIGNMENT = 16  # bytes, up to which kernels depend on an address

Record = dict[str, Any]


def record_of(call: Call, needs: Needs | None, moves: Needs | None = None) -> Record | None:
    """The record of a call's forward pass or, with `needs`, also of its backward pass; with `moves`, of forward mode.
    `None` for a call with a score_mod or a mask function: functions have no record.
    """
    if call.settings.score_mod is not None or call.settings.mask_mod is not None:
        return None
    record: Record = {
        "device": call.tensors.q.device.type,
        "tensors": layouts(call.tensors),
        "settings": {name: x for name, x in call.settings._asdict().items() if x is not None},
    }
    if isinstance(call, CacheCall):
        record |= {"cache": layouts(call.cache), "rotary": list(call.rotary)}
    for name, inputs in (("needs", needs), ("moves", moves)):
        if inputs is not None:
            record[name] = [field for field, chosen in zip(Needs._fields[:-1], inputs, strict=False) if chosen]
    return record


def moves_of(record: Record) -> Needs | None:
    """The inputs with a tangent, of a record of forward mode."""
    return Needs(**dict.fromkeys(record["moves"], True)) if "moves" in record else None


def layouts(tensors: Any) -> dict[str, list[Any]]:
    """Dtype, shape, strides and the address modulo 16 of each tensor that is there."""
    named = {name: x for name, x in tensors._asdict().items() if isinstance(x, Tensor)}
    return {
        name: [str(x.dtype).removeprefix("torch."), [*x.shape], [*x.stride()], address(x) % ALIGNMENT]
        for name, x in named.items()
    }


def call_of(record: Record, device: str) -> tuple[Call, Needs | None]:
    """A call of a record on "cpu" or "meta", and its requested gradients. On a CPU its tensors are uninitialized, but
    for indices: sequences are as long as fits.

    Raises:
        ValueError: this is no record.
    """
    try:
        tensors: dict[str, Any] = {name: like(x, device) for name, x in record["tensors"].items()}
        cache = {name: like(x, device) for name, x in record.get("cache", {}).items()}
        needs = None
        if "needs" in record:
            needs = Needs(**dict.fromkeys(record["needs"], True))
        call = Call(Tensors(**tensors), Settings(**record["settings"]))
        if cache:
            call = CacheCall(call, CacheTensors(**cache), RotarySettings(*record["rotary"]))
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise ValueError(f"no record of a call: {type(error).__name__}: {error}") from error
    if device == "cpu":
        fill_indices(tensors, cache, call.settings.max_seqlen_k)
    return call, needs


def like(layout: list[Any], device: str) -> Tensor:
    """An uninitialized tensor."""
    name, shape, stride, offset = layout
    dtype = getattr(torch, name)
    first = offset // dtype.itemsize
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    return torch.empty(first + span, dtype=dtype, device=device).as_strided(shape, stride, first)


def fill_indices(tensors: dict[str, Tensor], cache: dict[str, Tensor], longest: int | None) -> None:
    """Values of indices with which all sequences have as many rows and keys, at most `longest`."""
    q, k = tensors["q"], cache.get("k_cache", tensors["k"])
    table = cache.get("page_table", tensors.get("page_table"))
    of_rows = q.shape[0] if q.dim() == 3 else q.shape[2]
    new = cache.get("k")
    if table is not None:
        table.copy_((torch.arange(table.numel()) % max(k.shape[0], 1)).view(table.shape))
        capacity = table.shape[1] * k.shape[1]
    else:
        capacity = k.shape[2] if cache else k.shape[0]
    capacity = capacity if longest is None else min(capacity, longest)
    for name, total in (("cu_seqlens_q", of_rows), ("cu_seqlens_k", k.shape[0]), ("cu_seqlens_k_new", None)):
        x = tensors.get(name, cache.get(name))
        if x is not None:
            total = new.shape[0] if total is None and new is not None else total or 0
            x.copy_(torch.arange(x.shape[0]) * total // max(x.shape[0] - 1, 1))
    added = 0 if new is None else new.shape[2] if new.dim() == 4 else new.shape[0]
    for name, used in (("cache_seqlens", max(capacity - added, 0)), ("seqused_k", capacity), ("seqused_q", of_rows)):
        x = tensors.get(name, cache.get(name))
        if x is not None:
            offsets = tensors.get("cu_seqlens_k" if name == "seqused_k" else "cu_seqlens_q")
            x.copy_(offsets.diff() if offsets is not None and table is None and not cache else torch.tensor(used))
    if (index := cache.get("cache_batch_idx")) is not None:
        index.copy_(torch.arange(index.shape[0]))
    for name in ("leftpad_k", "rotary_start", "dropout_seed"):
        if (x := tensors.get(name, cache.get(name))) is not None:
            x.zero_()
