"""Records of the calls of a workload that is given by ranges of lengths and batches."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ..call.call import DIFFERENTIABLE, Needs
from ..call.check import DTYPES
from ..call.record import Record, record_of
from ..errors import ArgumentError
from .launches import call_of
from .standard import StandardCall, empty, offsets
from .workload import BATCHES, LENGTHS, MOST_ROWS

LAYOUTS = ("dense", "packed", "cache")
CPU_ROWS = 2**13  # rows of all sequences: with more, CPU kernels are the same
FEATURES = ("bias", "mask", "alibi_slopes", "sinks")
EXAMPLE = (
    "flashtile.prepare(heads=32, heads_kv=8, head_dim=128, dtype=torch.bfloat16, causal=True, lengths=(1, 8192), "
    "batches=(1, 16))"
)


def records_of_ranges(
    kind: dict[str, Any],
    settings: dict[str, Any],
    *,
    lengths: tuple[int, int],
    batches: tuple[int, int],
    training: bool,
    device: str,
) -> Iterator[Record]:
    """Records of forward and backward passes or, without `training`, of prompts and of single queries.

    Raises:
        ArgumentError: sizes or settings that no call has.
    """
    check(kind, lengths, batches)
    kind = kind | {"heads_kv": kind["heads_kv"] or kind["heads"], "head_dim_v": kind["head_dim_v"] or kind["head_dim"]}
    most = CPU_ROWS if device == "cpu" else MOST_ROWS
    for batch, length in itertools.product(within(BATCHES, *batches), within(LENGTHS, *lengths)):
        if batch * length > most and (batch, length) != (batches[0], lengths[0]):
            continue
        for rows in (length,) if training else (length, 1):
            differentiated = training and kind["layout"] != "cache"
            yield record(kind, settings, (batch, rows, length), training=differentiated) | {"device": device}


def within(known: tuple[int, ...], least: int, most: int) -> list[int]:
    """The known numbers of a range, and its ends."""
    return sorted({least, most, *(n for n in known if least <= n <= most)})


def record(kind: dict[str, Any], settings: dict[str, Any], size: tuple[int, int, int], *, training: bool) -> Record:
    """The record of a call of batch, rows and keys."""
    standard = standard_call(kind, settings, size, training=training)
    call, needs = call_of(standard), None
    if training:
        wanted = ("q", "k", "v", *standard.differentiated)
        needs = Needs(*(name in wanted for name in DIFFERENTIABLE))
    found = record_of(call, needs)
    if found is None:
        raise ArgumentError("score_mod or mask", "a function", "an example: prepare(lambda: ...)", EXAMPLE)
    return found


def standard_call(
    kind: dict[str, Any], settings: dict[str, Any], size: tuple[int, int, int], *, training: bool
) -> StandardCall:
    (batch, rows, keys), heads, heads_kv = size, kind["heads"], kind["heads_kv"]
    dim, dim_v, dtype = kind["head_dim"], kind["head_dim_v"], kind["dtype"]
    shapes = {
        "bias": ((1, heads, rows, keys), dtype),
        "mask": ((batch, 1, 1, keys), torch.bool),
        "alibi_slopes": ((heads,), torch.float32),
        "sinks": ((heads,), dtype),
    }
    features = [name for name in FEATURES if settings.get(name)]
    arguments = {name: x for name, x in settings.items() if name not in FEATURES}
    arguments |= {name: empty(*shapes[name][0], dtype=shapes[name][1]) for name in features}
    differentiated = tuple(name for name in features if name == "sinks") if training else ()
    if kind["layout"] == "packed":
        arguments |= {"q": empty(batch * rows, heads, dim, dtype=dtype)}
        arguments |= {name: empty(batch * keys, heads_kv, d, dtype=dtype) for name, d in (("k", dim), ("v", dim_v))}
        arguments |= {"cu_seqlens_q": offsets(batch), "cu_seqlens_k": offsets(batch)}
        arguments |= {"max_seqlen_q": rows, "max_seqlen_k": keys}
        return StandardCall("attention_varlen", arguments, training, differentiated)
    arguments["q"] = empty(batch, heads, rows, dim, dtype=dtype)
    shape = (batch, heads_kv, keys)
    if kind["layout"] == "dense":
        arguments |= {name: empty(*shape, d, dtype=dtype) for name, d in (("k", dim), ("v", dim_v))}
        return StandardCall("attention", arguments, training, differentiated)
    if page_size := kind["page_size"]:
        pages = -(-keys // page_size)
        shape = (batch * pages, page_size, heads_kv)
        arguments["page_table"] = empty(batch, pages, dtype=torch.int32)
    for name, d in (("k", dim), ("v", dim_v)):
        arguments |= {f"{name}_cache": empty(*shape, d, dtype=dtype)}
        arguments |= {name: empty(batch, heads_kv, rows, d, dtype=dtype)}
    arguments["cache_seqlens"] = empty(batch, dtype=torch.int32)
    return StandardCall("attention_with_kvcache", arguments)


def check(kind: dict[str, Any], lengths: tuple[int, int], batches: tuple[int, int]) -> None:
    for name in ("heads", "head_dim"):
        if not isinstance(kind[name], int) or kind[name] < 1:
            raise ArgumentError(name, kind[name], "an integer of at least 1", EXAMPLE)
    if kind["dtype"] not in DTYPES:
        raise ArgumentError("dtype", kind["dtype"], "torch.float16, bfloat16, float32 or float64", EXAMPLE)
    if kind["layout"] not in LAYOUTS:
        raise ArgumentError("layout", kind["layout"], ", ".join(map(repr, LAYOUTS)), EXAMPLE)
    if kind["page_size"] is not None and (kind["layout"] != "cache" or kind["page_size"] < 1):
        raise ArgumentError("page_size", kind["page_size"], "an integer of at least 1, with layout='cache'", EXAMPLE)
    for name, given in (("lengths", lengths), ("batches", batches)):
        if len(given) != 2 or not 1 <= given[0] <= given[1]:
            raise ArgumentError(name, given, "the least and the greatest, of at least 1", EXAMPLE)
