"""Caches whose positions are sharded give the results of one cache, and refuse what one cache refuses."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathered import check, without_objects
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.distributed import attention_with_kvcache, shard
from flashtile.testing.case import CACHES, Case
from flashtile.testing.eight_bit import with_eight_bits
from flashtile.testing.latent import latent
from flashtile.testing.packed_rows import packed_rows

BATCH, HEADS, KV_HEADS, D, DV, SIZE = 3, 4, 2, 16, 24, 7  # SIZE: positions of a rank, where all have as many


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def calls(room: int) -> list[dict[str, Any]]:
    """Arguments of whole calls: numbers of queries and of new keys, and features."""
    return [
        {"rows": 1, "new": 1, "causal": True},
        {"rows": 1, "new": 0, "window": (5, 0), "softcap": 2.0},
        {"rows": 3, "new": 3, "causal": True, "sinks": random(HEADS)},
        {"rows": 2, "new": 2, "window": (6, 1), "alibi_slopes": random(HEADS).abs()},
        {"rows": 9, "new": SIZE + 2, "causal": True, "mask": random(BATCH, 1, 9, room, seed=1) > -0.7},
        {"rows": 4, "new": 1, "bias": random(1, HEADS, 1, room), "alibi_slopes": random(BATCH, HEADS).abs()},
        {"rows": 2, "new": 2, "mask": torch.tensor([True, False, True])[:, None, None, None], "scale": 0.3},
        {"rows": 1, "new": 1, "causal": True, "stored": (torch.float8_e4m3fn, "heads")},
        {"rows": 2, "new": 4, "softcap": 2.0, "stored": (torch.int8, "tokens")},
        {"rows": 3, "new": SIZE + 1, "causal": True, "stored": (torch.float8_e5m2, "sequences")},
        {"rows": 2, "new": 3, "window": (6, 1), "v_dim": 10},
        {"rows": 1, "new": 1, "causal": True, "v_dim": 10, "stored": (torch.int8, "tokens")},
        {"rows": 1, "new": 1, "causal": True, "v_dim": 10, "stored": (torch.uint8, "rows of 656 bytes")},
    ]


def decode(mesh: DeviceMesh, every_room: bool) -> None:
    """Each call over caches of uneven pieces, and of even and empty ones."""
    ranks = mesh.size()
    for room in (ranks * SIZE - 1, ranks * SIZE, ranks - 1)[: None if every_room else 1]:
        for number, arguments in enumerate(calls(room)):
            rows, new = arguments.pop("rows"), min(arguments.pop("new"), room)
            for lengths in lengths_of_caches(room - new)[: 2 if every_room else 1]:
                step(mesh, room, (rows, new), lengths, number, arguments)


def lengths_of_caches(longest: int) -> list[tuple[int, ...]]:
    """Caches that are empty, end at and around the ends of pieces, or are full after the call."""
    around = min(SIZE - 1, longest), min(SIZE + 1, longest), longest // 2
    return [(0, min(SIZE, longest), longest), around]


def step(
    mesh: DeviceMesh,
    room: int,
    counts: tuple[int, int],
    lengths: tuple[int, ...],
    number: int,
    features: dict[str, Any],
) -> None:
    """Compare a call's results with the oracle's, and its caches with those of one device. `number` names the call."""
    rows, new = counts
    features = dict(features)
    stored = features.pop("stored", None)  # a dtype of 8 bits, and the kind of its scales
    v_dim = features.pop("v_dim", None)  # columns of the keys that are the values
    width = DV if v_dim is None else v_dim
    q, dout = random(BATCH, HEADS, rows, D, seed=5), random(BATCH, HEADS, rows, width, seed=6)
    arguments = {
        "q": q,
        "k_cache": random(BATCH + 1, KV_HEADS, room, D, seed=number),
        "v_cache": random(BATCH + 1, KV_HEADS, room, width, seed=9),
        "cache_seqlens": torch.tensor(lengths, dtype=torch.int32),
        **features,
    }
    if new > 0:
        arguments |= {"k": random(BATCH, KV_HEADS, new, D, seed=3), "v": random(BATCH, KV_HEADS, new, width, seed=4)}
    case = Case("attention_with_kvcache", arguments, dout, description=f"{stored}", forward_only=True)
    if stored is not None and stored[0] is not torch.uint8:
        case = with_eight_bits(case, stored[0], stored[1], stored[1], torch.Generator().manual_seed(7))
    if v_dim is not None:
        case = latent(case) if stored is None or stored[0] is not torch.uint8 else packed_rows(latent(case))
    given = dict(case.arguments)
    whole = {name: given[name].clone() for name in CACHES if getattr(given.get(name), "shape", ())[2:3] == (room,)}
    local = {name: shard(x, mesh, 2, length=room) for name, x in whole.items()}
    compared = number % 3 == 0
    place = {"mesh": mesh, "check": compared, "length": None if room % mesh.size() == 0 or compared else room}
    with contextlib.nullcontext() if compared else without_objects():
        results = attention_with_kvcache(**given | local, return_lse=True, **place)
    name = f"{features} {stored} {lengths} of {room}"
    check(case, dict(zip(("out", "lse"), results, strict=True)))
    if new > 0:
        flashtile.attention_with_kvcache(**given | whole)
        for part, x in whole.items():
            assert torch.equal(local[part].float(), shard(x, mesh, 2, length=room).float()), (name, part)


def refused(mesh: DeviceMesh) -> None:
    """One device and many raise the same error for the same argument, and write nothing."""
    room = mesh.size() * SIZE - 1
    q, new = random(2, 4, 2, 16).float(), random(2, 2, 3, 16).float()
    whole = [random(2, 2, room, 16, seed=n).float() for n in (1, 2)]
    pairs = torch.ones(1, 1, 1, room)
    wrong: list[dict[str, Any]] = [
        {"q": q[0]},
        {"q": q[:, :3]},
        {"q": q[..., :8]},
        {"q": q.double()},
        {"q": None},
        {"q": q.clone().requires_grad_()},
        {"q": torch.cat((q, q))},
        {"k_cache": None},
        {"k_cache": whole[0][0]},
        {"v_cache": whole[1][:1]},
        {"v_cache": whole[1].half()},
        {"v_cache": None},
        {"v_dim": 8},
        {"v_cache": None, "v_dim": 17},
        {"v_cache": None, "v_dim": 8, "k": new, "v": new[..., :8]},
        {"v_cache": None, "v_dim": 8, "k": new[..., :8]},
        {"cache_seqlens": room + 1},
        {"cache_seqlens": -1},
        {"cache_seqlens": 2.5},
        {"cache_seqlens": torch.tensor([3, room + 1])},
        {"cache_seqlens": torch.tensor([3, -2])},
        {"cache_seqlens": torch.tensor([3.0, 4.0])},
        {"cache_seqlens": torch.tensor([3])},
        {"cache_seqlens": room - 2, "k": new, "v": new},
        {"k": new},
        {"v": new},
        {"k": new, "v": new[:, :, :2]},
        {"k": new[:1], "v": new[:1]},
        {"k": new[:, :1], "v": new[:, :1]},
        {"k": new[..., :8], "v": new},
        {"k": new.double(), "v": new.double()},
        {"k": new, "v": new, "shared": True},
        {"mask": pairs},
        {"mask": pairs[..., :SIZE].bool()},
        {"mask": pairs[0].bool()},
        {"mask": pairs.expand(2, 3, 1, room).bool()},
        {"bias": pairs[..., :SIZE]},
        {"bias": pairs.bool()},
        {"alibi_slopes": torch.ones(3)},
        {"alibi_slopes": torch.ones(3, 4)},
        {"alibi_slopes": [1.0]},
        {"sinks": torch.ones(1, 4)},
        {"window": "x"},
        {"window": (1, 2, 3)},
        {"causal": 7},
        {"scale": float("nan")},
        {"softcap": -1.0},
        {"num_splits": 0},
        {"deterministic": 1},
        {"backend": 3},
        {"backend": "none"},
        {"backend": "triton", "k": new, "v": new},
    ]
    for number, case in enumerate(wrong):
        errors = []
        shared = case.pop("shared", False)  # one tensor as both caches
        for place in ({}, {"mesh": mesh, "length": room}):
            arguments = {"q": q, "k_cache": whole[0], "v_cache": whole[1], "cache_seqlens": 3, **case}
            names = [n for n in ("k_cache", "v_cache") if getattr(arguments[n], "ndim", 0) == 4]
            for name in names:
                x = arguments[name]
                arguments[name] = shard(x, mesh, 2, length=room) if place else x.clone()
            if shared:
                arguments["v_cache"] = arguments["k_cache"]
            before = {name: arguments[name].clone() for name in names}
            with pytest.raises(flashtile.AttentionError) as raised:
                (attention_with_kvcache if place else flashtile.attention_with_kvcache)(**arguments, **place)
            errors.append((type(raised.value), getattr(raised.value, "argument", None)))
            assert all(torch.equal(arguments[name], x) for name, x in before.items()), (number, case)
        assert errors[0] == errors[1], (number, case, errors)


def refused_alone(mesh: DeviceMesh) -> None:
    """Mistakes that one device does not know, and that a rank finds by itself."""
    ranks = mesh.size()
    q, cache = torch.randn(1, 2, 1, 16), torch.randn(1, 2, SIZE, 16)
    nothing = cache[:, :, :0]
    wrong: list[tuple[Tensor, dict[str, Any], str]] = [
        (cache, {"mask": lambda b, h, i, j: i >= j}, "keys of all ranks"),
        (cache, {"causal": "top_left"}, "causal"),
        (cache, {"length": ranks * SIZE + ranks}, "as `shard` cuts them"),
        (cache, {"length": -1}, "length"),
        (cache, {"length": 0}, "as `shard` cuts them"),
        (nothing, {}, "room for at least one key"),
        (cache, {"k_descale": torch.ones(2)}, "None for keys of torch.float32"),
        (cache.to(torch.int8), {"k_descale": torch.ones(1, 2, ranks * SIZE)}, f"S_max = {SIZE}"),
        (cache.to(torch.int8), {"v_descale": torch.ones(2).double()}, "float32"),
    ]
    for x, given, words in wrong:
        with pytest.raises(flashtile.ArgumentError, match=words):
            attention_with_kvcache(q, x.clone(), x.clone(), mesh=mesh, **{"cache_seqlens": 3, **given})


def compared(mesh: DeviceMesh) -> None:
    """Steps that differ between ranks are refused on all of them, by the name of what differs."""
    second = mesh.get_local_rank() == 1
    q, new = torch.ones(2, 2, 1, 16), torch.ones(2, 2, 1, 16)
    cache = torch.ones(2, 2, SIZE + 2 * second, 16)
    even = cache[:, :, :SIZE].clone()
    wrong: list[tuple[Tensor, dict[str, Any], str]] = [
        (cache, {}, "positions on the ranks"),
        (even, {"scale": 0.5 if second else 0.25}, "scale"),
        (even, {"length": None if second else mesh.size() * SIZE}, "length"),
        (even, {"cache_seqlens": torch.tensor([3, 4 + second])}, "values of cache_seqlens. differ"),
        (even, {"k": new + second, "v": new}, "values of k. differ"),
        (even, {"k": new, "v": new} if second else {}, "differs between ranks"),
        (even.double() if second else even, {}, "k_cache"),
        (even, {"q": q + second}, "values of q. differ"),
        (even, {"cache_seqlens": -1 if second else 1}, "cache_seqlens"),
        (even, {"window": "x" if second else None}, "window"),
    ]
    for x, given, words in wrong:
        arguments = {"q": q, "k_cache": x, "v_cache": x.clone(), "cache_seqlens": torch.tensor([3, 4]), **given}
        with pytest.raises(flashtile.AttentionError, match=words):
            attention_with_kvcache(mesh=mesh, check=True, **arguments)
    dist.barrier(mesh.get_group())
