"""Caches whose positions are sharded give the results of one cache."""

from typing import Any

import pytest
import torch
from gathered import check
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import flashtile
from flashtile.distributed import attention_with_kvcache
from flashtile.testing.case import Case

BATCH, HEADS, KV_HEADS, D, DV, SIZE = 3, 4, 2, 16, 24, 7  # SIZE: positions of a rank


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
    ]


def decode(mesh: DeviceMesh) -> None:
    """Each call over caches that are empty, end at and around the ends of pieces, or are full after it."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    room = ranks * SIZE
    for number, arguments in enumerate(calls(room)):
        rows, new = arguments.pop("rows"), arguments.pop("new")
        longest = room - new
        for lengths in (
            (0, min(SIZE, longest), longest),
            (min(SIZE - 1, longest), min(SIZE + 1, longest), longest // 2),
        ):
            caches = random(BATCH, KV_HEADS, room, D, seed=number), random(BATCH, KV_HEADS, room, DV, seed=9)
            given = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), **arguments}
            if new > 0:
                given |= {"k": random(BATCH, KV_HEADS, new, D, seed=3), "v": random(BATCH, KV_HEADS, new, DV, seed=4)}
            q, dout = random(BATCH, HEADS, rows, D, seed=5), random(BATCH, HEADS, rows, DV, seed=6)
            whole = {"q": q, "k_cache": caches[0].clone(), "v_cache": caches[1].clone(), **given}
            local = [x[:, :, rank * SIZE : (rank + 1) * SIZE].clone() for x in caches]
            results = attention_with_kvcache(q, *local, mesh=mesh, return_lse=True, **given)
            case = Case("attention_with_kvcache", whole, dout, description=f"{arguments} {lengths}", forward_only=True)
            check(case, dict(zip(("out", "lse"), results, strict=True)))
            if new > 0:
                flashtile.attention_with_kvcache(q, *caches, **given)
                for x, cache in zip(local, caches, strict=True):
                    assert torch.equal(x, cache[:, :, rank * SIZE : (rank + 1) * SIZE]), (arguments, lengths)


def refused(mesh: DeviceMesh) -> None:
    q, cache = torch.randn(1, 2, 1, 16), torch.randn(1, 2, SIZE, 16)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"k": q}, "v"),
        ({"mask": torch.ones(1, 1, 1, SIZE, dtype=torch.bool)}, "keys of all ranks"),
        ({"mask": lambda b, h, i, j: i >= j}, "keys of all ranks"),
        ({"causal": "top_left"}, "causal"),
        ({"cache_seqlens": -1}, "cache_seqlens"),
    ]
    for given, words in wrong:
        with pytest.raises(flashtile.ArgumentError, match=words):
            attention_with_kvcache(q, cache, cache, mesh=mesh, **{"cache_seqlens": 3, **given})
