"""Random problems over the whole contract, each reproducible from its seed and variation.

Memory that a call must not read is NaN: tokens of no sequence, keys past a length, unused pages and slots.
"""

import functools
from dataclasses import replace
from typing import Any

import torch

from .case import Case
from .draw import NAN, Draw, Values
from .eight_bit import maybe_eight_bits
from .generate_cache import cache_case
from .hopper_draw import HopperDraw, for_hopper, is_for_hopper
from .layouts import expanded_cotangent
from .pages import in_pages

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def random_case(
    seed: int,
    *,
    device: torch.device | str = "cpu",
    dtypes: tuple[torch.dtype, ...] | None = None,
    function: str | None = None,
    values: Values | None = None,
    variation: int = 0,
    on_hopper: bool = False,
) -> Case:
    """The problem number `seed`; the same values on every device. q, k and v come from `values` if it is given.

    Its variations are further problems, which differ in lengths and values and mostly need the same kernels. With
    `on_hopper`, most seeds have problems that Hopper's kernels take.
    """
    dtypes = dtypes or DTYPES
    drawn_by = HopperDraw if on_hopper and is_for_hopper(seed, dtypes) else Draw
    kept = _kept_choices(drawn_by, seed, dtypes, function, values) if variation > 0 else ()
    case = _made(drawn_by((seed, variation), torch.device(device), dtypes, values, kept), function)
    return for_hopper(case) if drawn_by is HopperDraw else case


@functools.lru_cache(maxsize=1)  # the variations of a seed come one after another
def _kept_choices(
    drawn_by: type[Draw], seed: int, dtypes: tuple[torch.dtype, ...], function: str | None, values: Values | None
) -> tuple[Any, ...]:
    """The choices that variations share: variation 0's."""
    draw = drawn_by((seed, 0), torch.device("cpu"), dtypes, values)
    _made(draw, function)
    return tuple(draw.kept)


def _made(draw: Draw, function: str | None) -> Case:
    makers = {"attention": _dense_case, "attention_varlen": _varlen_case, "attention_with_kvcache": cache_case}
    function = function or draw.pick({"attention": 6, "attention_varlen": 4, "attention_with_kvcache": 3})
    if function not in makers:
        raise ValueError(f"function is {function!r}, should be one of {', '.join(map(repr, makers))}")
    case = maybe_eight_bits(makers[function](draw), draw)
    return replace(case, arguments=draw.wide_indices(case.arguments), description="")


def _dense_sizes(draw: Draw) -> tuple[int, int, int, int]:
    """Query heads, batch, and the two lengths."""
    batch = draw.pick({0: 1, 1: 10, 2: 8, 3: 3})
    seqlen_q, seqlen_k = draw.seqlen(), draw.seqlen()
    if draw.chance(0.4):
        seqlen_k = seqlen_q
    while not draw.affordable(batch * seqlen_q * seqlen_k):
        if batch > 1:
            batch -= 1
        elif draw.num_heads_q > draw.num_heads_kv:
            draw.num_heads_q -= draw.num_heads_kv
        else:
            seqlen_q, seqlen_k = seqlen_q * 3 // 4, seqlen_k * 3 // 4
    return draw.num_heads_q, batch, seqlen_q, seqlen_k


def _dense_case(draw: Draw) -> Case:
    draw.num_heads_q, batch, seqlen_q, seqlen_k = draw.keep(lambda: _dense_sizes(draw))
    if batch > 0:
        lengths_q, lengths_k = draw.vary([seqlen_q] * batch, [seqlen_k] * batch)
        batch, seqlen_q, seqlen_k = len(lengths_q), lengths_q[0], lengths_k[0]
    q, k, v = draw.query_key_value(
        (batch, draw.num_heads_q, seqlen_q, draw.head_dim),
        (batch, draw.num_heads_kv, seqlen_k, draw.head_dim),
        (batch, draw.num_heads_kv, seqlen_k, draw.head_dim_v),
    )
    arguments: dict[str, Any] = {"q": draw.operand(q), "k": draw.operand(k), "v": draw.operand(v)}
    arguments |= draw.features([(seqlen_q, seqlen_k)] * batch, seqlen_q, seqlen_k) | _splits(draw)
    out_shape = (batch, draw.num_heads_q, seqlen_q, draw.head_dim_v)
    dout, dlse = draw.cotangents(out_shape, out_shape[:3])
    if dout is not None:
        everywhere = draw.chance(0.15)
        dout = expanded_cotangent(out_shape, 1.0, draw.dtype, draw.device) if everywhere else draw.layout(dout)
    dlse = draw.layout(dlse) if dlse is not None else None
    return Case("attention", arguments, dout, dlse, draw.seed, draw.variation)


def _splits(draw: Draw) -> dict[str, Any]:
    return {"num_splits": draw.further.choice([1, 2, 7])} if draw.also(0.1) else {}


def _varlen_lengths(draw: Draw) -> tuple[list[int], list[int]]:
    batch = draw.pick({0: 1, 1: 4, 2: 6, 3: 5, 5: 3, 8: 1})
    lengths_q = [0 if draw.chance(0.1) else draw.seqlen() for _ in range(batch)]
    lengths_k = list(lengths_q) if draw.chance(0.4) else [draw.seqlen() for _ in range(batch)]
    while not draw.affordable(sum(n * m for n, m in zip(lengths_q, lengths_k, strict=True))):
        lengths_q, lengths_k = [n * 3 // 4 for n in lengths_q], [n * 3 // 4 for n in lengths_k]
    return lengths_q, lengths_k


def _varlen_case(draw: Draw) -> Case:
    rng, device = draw.rng, draw.device
    lengths_q, lengths_k = draw.vary(*draw.keep(lambda: _varlen_lengths(draw)))
    batch = len(lengths_q)
    spare_q, spare_k = (rng.randint(1, 20) if draw.chance(0.3) else 0 for _ in range(2))
    total_q, total_k = sum(lengths_q) + spare_q, sum(lengths_k) + spare_k

    # [H, T, D], so that tokens lie in the last dimension but one for the inputs; the public order is [T, H, D].
    shapes = ((draw.num_heads_q, total_q, draw.head_dim), (draw.num_heads_kv, total_k, draw.head_dim))
    q, k, v = draw.query_key_value(*shapes, (draw.num_heads_kv, total_k, draw.head_dim_v))
    q, k, v = q.transpose(0, 1).contiguous(), k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
    k[sum(lengths_k) :] = v[sum(lengths_k) :] = NAN  # tokens of no sequence
    starts_q, starts_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    arguments: dict[str, Any] = {"cu_seqlens_q": starts_q.to(device), "cu_seqlens_k": starts_k.to(device)}

    used_q = list(lengths_q)
    if draw.also(0.2) and "seqused_q" not in draw.left_out:
        used_q = [n if draw.values_of_further.random() < 0.4 else draw.values_of_further.randint(0, n) for n in used_q]
        arguments["seqused_q"] = torch.tensor(used_q, dtype=torch.int32, device=device)
    unused = torch.ones(total_q, dtype=torch.bool)  # tokens of no sequence
    for start, n in zip(starts_q.tolist(), used_q, strict=False):
        unused[start : start + n] = False
    q[unused] = NAN
    used = list(lengths_k)
    if draw.chance(0.3):
        used = [n if rng.random() < 0.4 else rng.randint(0, n) for n in lengths_k]
        arguments["seqused_k"] = torch.tensor(used, dtype=torch.int32, device=device)
        for start, n, length in zip(starts_k.tolist(), used, lengths_k, strict=False):
            k[start + n : start + length] = v[start + n : start + length] = NAN
    capacity = total_k  # what max_seqlen_k=None stands for
    if batch and draw.chance(0.35):
        k, v, table = in_pages(draw, k, v, starts_k.tolist(), used, used)
        arguments["page_table"] = table.to(device)
        capacity = table.shape[1] * k.shape[1]
        if "seqused_k" in arguments and draw.chance(0.5):
            arguments["cu_seqlens_k"] = None
    expandable = () if "page_table" in arguments else (1, 2)  # never over tokens: not all of them are a sequence's
    arguments = {
        "q": draw.operand(q, (1, 2)),
        "k": draw.operand(k, expandable),
        "v": draw.operand(v, expandable),
        **arguments,
    }

    longest_k = lengths_k if arguments["cu_seqlens_k"] is not None else used
    for name, lengths in (("max_seqlen_q", lengths_q), ("max_seqlen_k", longest_k)):
        longest = max(lengths, default=0)
        bounds = list(dict.fromkeys((None, longest, longest + rng.randint(0, 30))))
        chosen = draw.pick(dict.fromkeys(range(len(bounds)), 1))
        arguments[name] = bounds[min(chosen, len(bounds) - 1)]
    limits = [arguments["max_seqlen_q"], arguments["max_seqlen_k"]]
    limits = [limit if limit is not None else total for limit, total in zip(limits, (total_q, capacity), strict=True)]
    arguments |= draw.features(list(zip(used_q, used, strict=True)), *limits) | _splits(draw)

    out_shape = (total_q, draw.num_heads_q, draw.head_dim_v)
    dout, dlse = draw.cotangents(out_shape, (draw.num_heads_q, total_q))
    if dout is not None:
        dout[unused] = NAN
        everywhere = draw.chance(0.15)
        dout = expanded_cotangent(out_shape, 1.0, draw.dtype, device) if everywhere else draw.layout(dout, (1, 2))
    if dlse is not None:
        dlse[:, unused] = NAN
        dlse = draw.layout(dlse, (0,))
    return Case("attention_varlen", arguments, dout, dlse, draw.seed, draw.variation)
