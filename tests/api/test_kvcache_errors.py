"""attention_with_kvcache: mistakes are named and change nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cached import (
    CACHES,
    Arguments,
    angles,
    call_in_place,
    int32,
    problem,
    run,
    same_bits,
)
from checking import changed_during_calls
from torch import Tensor

import flashtile
from flashtile import ArgumentError


def without(name: str) -> Callable[[Arguments], Arguments]:
    return lambda x: {n: value for n, value in x.items() if n != name}


def side_by_side(arguments: Arguments, shared: int = 0) -> Arguments:
    """Caches as parts of one tensor, with features in common."""
    k, v = (arguments[name] for name in CACHES)
    both = torch.cat((k, v[..., shared:]), dim=-1)
    return {"k_cache": both[..., : k.shape[-1]], "v_cache": both[..., k.shape[-1] - shared :]}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda x: x | {name: change(x.get(name))}


COS, SIN = angles(12, 8)
COLUMN = torch.arange(3)  # of page tables
ROTARY: Arguments = {"rotary_cos": COS, "rotary_sin": SIN}
Change = Callable[[Arguments], Arguments]
# The argument that the error names, a call that works, and what is wrong with it.
MISTAKES: dict[str, tuple[str, Arguments, Change]] = {
    "cache too small": ("k_cache", {}, changed("cache_seqlens", lambda _: int32(3, 0, 11))),
    "cache much too small": ("cache_seqlens", {}, changed("cache_seqlens", lambda _: int32(3, 0, 2**31 - 1))),
    "longer than pages": (
        "cache_seqlens",
        {"page_size": 4},
        changed("cache_seqlens", lambda _: int32(3, 0, 2**31 - 2)),
    ),
    "expanded k_cache": ("k_cache", {}, changed("k_cache", lambda x: x[:, :, :1].expand(x.shape))),
    "expanded v_cache": ("v_cache", {}, changed("v_cache", lambda x: x[:1].expand(x.shape))),
    "pages that overlap": (
        "v_cache",
        {"page_size": 4},
        changed("v_cache", lambda x: x.as_strided(x.shape, (x.stride(0) - 1, *x.stride()[1:]))),
    ),
    "one cache for k and v": ("v_cache", {}, lambda x: x | {"v_cache": x["k_cache"], "v": x["k"]}),
    "caches that share a feature": ("v_cache", {}, lambda x: x | side_by_side(x, shared=1)),
    "page table too short": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x[:, :2])),
    "page below": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x.where(COLUMN != 1, -1))),
    "page above": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x.where(COLUMN != 0, 99))),
    "row below": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, -1, 2))),
    "row above": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, 5, 2))),
    "one row twice": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, 1, 0))),
    "rows of pages": (
        "cache_batch_idx",
        {"page_size": 4},
        lambda given: given | {"cache_batch_idx": int32(0, len(given["page_table"]), 2)},
    ),
    "rows of float": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: torch.zeros(3))),
    "too few rows": ("cache_batch_idx", {}, changed("cache_batch_idx", lambda _: int32(0, 1))),
    "negative length": ("cache_seqlens", {}, changed("cache_seqlens", lambda _: int32(3, -1, 8))),
    "too few lengths": ("cache_seqlens", {}, changed("cache_seqlens", lambda x: x[:2])),
    "lengths of float": ("cache_seqlens", {}, changed("cache_seqlens", lambda x: x.float())),
    "lengths of a list": ("cache_seqlens", {}, changed("cache_seqlens", lambda x: x.tolist())),
    "no lengths": ("cache_seqlens", {}, changed("cache_seqlens", lambda _: None)),
    "leftpad too long": ("leftpad_k", {}, changed("leftpad_k", lambda _: int32(6, 0, 0))),
    "leftpad below": ("leftpad_k", {}, changed("leftpad_k", lambda _: int32(0, -1, 0))),
    "leftpad of one": ("leftpad_k", {}, changed("leftpad_k", lambda _: int32(0))),
    "rotary too short": ("rotary_cos", ROTARY, lambda x: x | {"rotary_cos": COS[:9], "rotary_sin": SIN[:9]}),
    "rotary too wide": ("rotary_cos", {}, lambda x: x | dict(zip(ROTARY, angles(12, 10), strict=True))),
    "rotary of one dimension": ("rotary_cos", ROTARY, lambda x: x | {"rotary_cos": COS[0], "rotary_sin": SIN[0]}),
    "no sine": ("rotary_sin", ROTARY, without("rotary_sin")),
    "no cosine": ("rotary_cos", ROTARY, without("rotary_cos")),
    "sine of another size": ("rotary_sin", ROTARY, changed("rotary_sin", lambda x: x[:-1])),
    "cosine of another dtype": ("rotary_cos", ROTARY, changed("rotary_cos", lambda x: x.double())),
    "no k": ("k", {}, without("k")),
    "no v": ("v", {}, without("v")),
    "k of another dtype": ("k", {}, changed("k", lambda x: x.half())),
    "k of other heads": ("k", {}, changed("k", lambda x: x[:, :1])),
    "k of another width": ("k", {}, changed("k", lambda x: x[..., :4])),
    "k of another batch": ("k", {}, changed("k", lambda x: x[:2])),
    "k longer than v": ("v", {}, changed("v", lambda x: x[:, :, :1])),
    "k not packed": ("k", {"new": (2, 1, 1)}, changed("k", lambda x: x[None].transpose(1, 2))),
    "v of another width": ("v", {}, changed("v", lambda x: x[..., :4])),
    "q of three dimensions": ("q", {}, changed("q", lambda x: x[0])),
    "q packed without offsets": ("q", {"new": (2, 1, 1)}, without("cu_seqlens_q")),
    "q of other heads": ("k_cache", {}, changed("q", lambda x: x[:, :3])),
    "q of another width": ("k_cache", {}, changed("q", lambda x: x[..., :4])),
    "q no tensor": ("q", {}, changed("q", lambda x: x.tolist())),
    "cache no tensor": ("v_cache", {}, changed("v_cache", lambda _: None)),
    "cache of another dtype": ("k_cache", {}, changed("k_cache", lambda x: x.double())),
    "caches of two lengths": ("v_cache", {}, changed("v_cache", lambda x: x[:, :, :-1])),
    "caches of two batches": ("v_cache", {}, changed("v_cache", lambda x: x[:-1])),
    "caches too few": ("k_cache", {}, lambda x: x | {name: x[name][:2] for name in CACHES}),
    "cache of no slots": ("k_cache", {}, lambda x: x | {name: x[name][:, :, :0] for name in CACHES}),
    "pages of no slots": ("k_cache", {"page_size": 4}, lambda x: x | {name: x[name][:, :0] for name in CACHES}),
    "cache of three dimensions": ("k_cache", {}, changed("k_cache", lambda x: x[0])),
    "table of one dimension": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x[0])),
    "table of float": ("page_table", {"page_size": 4}, changed("page_table", lambda x: x.float())),
    "offsets that fall": ("cu_seqlens_q", {"new": (2, 1, 1)}, changed("cu_seqlens_q", lambda _: int32(0, 2, 1, 4))),
    "offsets past the end": (
        "cu_seqlens_q",
        {"new": (2, 1, 1), "capacity": 20},
        changed("cu_seqlens_q", lambda _: int32(0, 2, 3, 9)),
    ),
    "offsets from 1": ("cu_seqlens_q", {"new": (2, 1, 1)}, changed("cu_seqlens_q", lambda _: int32(1, 2, 3, 4))),
    "splits of zero": ("num_splits", {}, changed("num_splits", lambda _: 0)),
    "splits of a half": ("num_splits", {}, changed("num_splits", lambda _: 0.5)),
    "mask of another length": ("mask", {}, changed("mask", lambda _: torch.ones(1, 1, 1, 11, dtype=torch.bool))),
    "bias of another length": ("bias", {}, changed("bias", lambda _: torch.ones(1, 1, 2, 10))),
    "window of one side": ("window", {}, changed("window", lambda _: (2,))),
    "rotary_interleaved of None": ("rotary_interleaved", ROTARY, changed("rotary_interleaved", lambda _: None)),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named_and_change_nothing(name: str) -> None:
    """Before anything is written: the caches are as they were."""
    argument, sizes, change = MISTAKES[name]
    works = problem(**sizes)
    run(works)
    wrong = change(works)
    tensors = {n: wrong[n] for n in CACHES if isinstance(wrong[n], Tensor)}
    before = {n: x.clone() for n, x in tensors.items()}
    with pytest.raises(ArgumentError) as error:
        call_in_place(wrong)
    assert error.value.argument == argument
    assert f"`{argument}`" in str(error.value)
    assert "attention" in str(error.value)  # a call that works
    assert all(same_bits(x, before[n]) for n, x in tensors.items())


def test_caches_that_share_memory_can_be_read() -> None:
    """Without tokens to append; and side by side they may be written."""
    arguments = problem(new=None)
    expanded = arguments["v_cache"].nan_to_num()[:1].expand(arguments["v_cache"].shape)
    found = call_in_place(arguments | {"v_cache": expanded})
    assert same_bits(found, call_in_place(arguments | {"v_cache": expanded.clone()}))
    arguments = problem()
    adjacent = arguments | side_by_side(arguments)
    assert same_bits(call_in_place(adjacent), run(arguments).out)


def test_caches_come_to_share_memory() -> None:
    """After a call of the same signature on caches that do not."""
    arguments = problem(head_dim_v=8)
    run(arguments)
    k_cache, v_cache = (arguments[name] for name in CACHES)
    assert k_cache.stride() == v_cache.stride()
    with pytest.raises(ArgumentError, match="shares no element with k_cache"):
        call_in_place(arguments | {"v_cache": k_cache})


def test_an_unknown_backend_changes_nothing() -> None:
    refused_by_name = problem()
    before = refused_by_name["k_cache"].clone()
    with pytest.raises(flashtile.BackendError):
        call_in_place(refused_by_name, backend="none")
    assert same_bits(refused_by_name["k_cache"], before)


@pytest.mark.parametrize("backend", ["cpu", "tiled", "reference"])
@pytest.mark.parametrize("sizes", [{}, {"page_size": 4}, {"new": (2, 1, 1)}], ids=str)
def test_indices_that_change_during_a_call(sizes: dict[str, Any], backend: str) -> None:
    arguments = problem(**sizes) | {"leftpad_k": int32(1, 0, 2)}
    if "page_size" not in sizes:
        arguments["cache_batch_idx"] = int32(2, 0, 1)
    expected = run(arguments, backend=backend)
    names = ("cache_seqlens", "page_table", "cache_batch_idx", "leftpad_k", "cu_seqlens_q")
    with changed_during_calls([arguments[name] for name in names if name in arguments]) as entered:
        found = run(arguments, backend=backend)
    assert entered
    assert all(same_bits(x, y) for x, y in zip(found, expected, strict=True))
