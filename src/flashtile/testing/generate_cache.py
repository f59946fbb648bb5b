"""Random problems with a KV cache: dense or in pages, appended to or only read, with or without rotary positions."""

from typing import Any

import torch
from torch import Tensor

from .case import Case
from .draw import NAN, Draw
from .pages import in_pages


def cache_case(draw: Draw) -> Case:
    rng, device = draw.rng, draw.device
    batch = draw.pick({0: 1, 1: 5, 2: 6, 3: 4, 5: 2})
    packed, appends, paged = draw.chance(0.35), draw.chance(0.8), batch > 0 and draw.chance(0.5)
    queries, held, new = draw.vary(*draw.keep(lambda: _lengths(draw, batch, packed, appends)))
    batch = len(queries)
    one_length = batch > 0 and draw.also(0.1)  # an int for all sequences
    if one_length:
        held = [min(held)] * batch
    apart = appends and draw.also(0.2)  # new keys of other lengths, packed by offsets of their own
    if apart:
        new = [draw.values_of_further.choice([1, n + 1, n + 2, 0 if b else 2]) for b, n in enumerate(new)]
    total = [n + m for n, m in zip(held, new, strict=True)]  # keys after the call
    spare = rng.randint(1, 5) if packed and draw.chance(0.3) else 0  # tokens of no sequence

    k_shape = (draw.num_heads_kv, sum(total), draw.head_dim)
    q, k, v = draw.query_key_value(
        (draw.num_heads_q, sum(queries), draw.head_dim), k_shape, (*k_shape[:2], draw.head_dim_v)
    )
    q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))  # tokens first
    starts = torch.tensor([0, *total]).cumsum(0).tolist()
    arguments: dict[str, Any] = {"cache_seqlens": torch.tensor(held, dtype=torch.int32)}
    tokens = {"q": q}
    if appends:
        added = [torch.arange(starts[b] + held[b], starts[b + 1]) for b in range(batch)]
        index = torch.cat([torch.arange(0), *added])
        tokens |= {"k": k[index], "v": v[index]}
        k[index] = v[index] = NAN  # the slots that the call writes
    if packed:
        arguments["cu_seqlens_q"] = torch.tensor([0, *queries]).cumsum(0).int()
    if apart:
        arguments["cu_seqlens_k_new"] = torch.tensor([0, *new]).cumsum(0).int()
    if draw.chance(0.3) and "leftpad_k" not in draw.left_out:
        arguments["leftpad_k"] = torch.tensor([rng.randint(0, n) for n in total], dtype=torch.int32)
        for start, n, pad in zip(starts, held, arguments["leftpad_k"].tolist(), strict=False):
            k[start : start + min(n, pad)] = v[start : start + min(n, pad)] = NAN

    if paged:
        k_cache, v_cache, arguments["page_table"] = in_pages(draw, k, v, starts, total, held)
        capacity = arguments["page_table"].shape[1] * k_cache.shape[1]
        if draw.also(0.25):
            arguments |= _rows_of_table(draw, arguments["page_table"])
    else:
        k_cache, v_cache, rows = _dense_caches(draw, k, v, starts, total)
        capacity = k_cache.shape[2]
        if rows is not None:
            arguments["cache_batch_idx"] = rows
    if draw.head_dim > 1 and draw.chance(0.5):
        start = _rotary_start(draw, batch)
        after = max((int(n) for n in start.get("rotary_start", ())), default=0) + max((*queries, *new), default=0)
        arguments |= _rotary(draw, max(*total, after, 0)) | start
    arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
    arguments |= {"k_cache": draw.operand(k_cache, ()), "v_cache": draw.operand(v_cache, ())}
    if one_length:
        arguments["cache_seqlens"] = held[0]
    for name, x in tokens.items():
        if packed or (apart and name != "q"):
            filler = NAN if name == "q" else 1.0  # empty slots are NaN, so a NaN written there would not show
            x = torch.cat((x, x.new_full((spare, *x.shape[1:]), filler)))
            arguments[name] = draw.operand(x, (1, 2))
        else:
            arguments[name] = draw.operand(x.unflatten(0, (batch, -1) if batch else (0, 1)).transpose(1, 2))

    rows = sum(queries) + spare if packed else max(queries, default=1)
    arguments |= draw.features(list(zip(queries, total, strict=True)), rows, capacity)
    if draw.chance(0.3):
        arguments["num_splits"] = draw.choice([1, 2, 7])
    return Case("attention_with_kvcache", arguments, seed=draw.seed, variation=draw.variation)


def _lengths(draw: Draw, batch: int, packed: bool, appends: bool) -> tuple[list[int], list[int], list[int]]:
    """Queries, cached keys and keys to append of each sequence. Without packing only the cached keys differ."""

    def count() -> int:
        return draw.pick({1: 4, 0: 0.3, draw.rng.randint(2, 9): 2, draw.seqlen(): 1})

    new = [count() for _ in range(batch)] if packed else [count()] * batch
    queries = list(new)
    if not packed and draw.chance(0.2):
        queries = [count()] * batch
    new = new if appends else [0] * batch
    held = [draw.pick({0: 1, draw.seqlen(): 5}) for _ in range(batch)]
    while not draw.affordable(sum(n * (m + h) for n, m, h in zip(queries, new, held, strict=True))):
        held, queries = [n // 2 for n in held], [n * 3 // 4 for n in queries]
        new = queries if packed and appends else [n * 3 // 4 for n in new]
    return queries, held, new


def _dense_caches(
    draw: Draw, k: Tensor, v: Tensor, starts: list[int], total: list[int]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Caches `[B_cache, Hkv, S_max, D]`, NaN in empty slots, and the row of each sequence."""
    batch, capacity = len(total), max(1, max(total, default=0) + draw.rng.choice([0, 0, 1, 30]))
    spare = draw.rng.randint(0, 2)
    rows = torch.randperm(batch + spare, generator=draw.generator)[:batch].int() if draw.chance(0.4) else None

    def filled(x: Tensor) -> Tensor:
        cache = x.new_full((batch + spare, x.shape[1], capacity, x.shape[2]), NAN)
        for b, n in enumerate(total):
            cache[b if rows is None else int(rows[b]), :, :n] = x[starts[b] : starts[b] + n].transpose(0, 1)
        return cache

    return filled(k), filled(v), rows


def _rows_of_table(draw: Draw, table: Tensor) -> dict[str, Tensor]:
    """The page table with its rows in another order and rows of no sequence, and where each sequence's is."""
    batch, spare = table.shape[0], draw.values_of_further.randint(0, 2)
    rows = draw.values_of_further.sample(range(batch + spare), batch)
    larger = table.new_full((batch + spare, table.shape[1]), -1)
    larger[rows] = table
    return {"page_table": larger, "cache_batch_idx": torch.tensor(rows, dtype=torch.int32)}


def _rotary_start(draw: Draw, batch: int) -> dict[str, Any]:
    """Rotary positions other than the cache's, and one position for all queries of a sequence."""
    arguments: dict[str, Any] = {}
    if draw.also(0.3):
        starts = [draw.values_of_further.randint(0, 40) for _ in range(batch)]
        arguments["rotary_start"] = torch.tensor(starts, dtype=torch.int32)
    if draw.also(0.2):
        arguments["rotary_q_fixed"] = True
    return arguments


def _rotary(draw: Draw, longest: int) -> dict[str, Any]:
    """Angles as in RoFormer, for a part of the head dimension, and for a few positions more than needed."""
    pairs = draw.choice([draw.head_dim // 2, draw.head_dim // 2, max(1, draw.head_dim // 4), 1])
    frequency = 10000.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    angle = torch.arange(max(1, longest) + draw.rng.randint(0, 3))[:, None] * frequency
    dtype = draw.choice([draw.dtype, torch.float32])
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": draw.chance(0.5)}
