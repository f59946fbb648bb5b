"""Calls with DTensors, by their placements."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gathered import D, check, dense_case
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import flashtile
from flashtile.distributed import attention, context_parallel, shard, unshard
from flashtile.distributed.dtensor import part_of_mesh
from flashtile.testing.case import MaskFunction, ScoreFunction

BATCH, HEADS, ROWS, ALL = Shard(0), Shard(1), Shard(2), Replicate()
PLACEMENTS = {
    1: [[BATCH], [HEADS], [ROWS], [ALL]],
    2: [[BATCH, ROWS], [ROWS, HEADS], [HEADS, BATCH], [ROWS, ROWS], [ALL, ROWS], [HEADS, HEADS]],
    3: [[BATCH, ROWS, HEADS], [ROWS, HEADS, ROWS]],
}
LETTERS = {"sinks": "H", "alibi_slopes": "BH"}  # dimensions; of the other tensors B, H, S, ...


def whole_as(x: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A tensor that all ranks have as a DTensor, without communication."""
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


def calls_of_dtensors(mesh: DeviceMesh) -> None:
    all_placements(mesh)
    if mesh.ndim == 1:
        refused(mesh)
        other_layout(mesh)
    else:
        within_context(mesh)


def all_placements(mesh: DeviceMesh) -> None:
    for n, placements in enumerate(PLACEMENTS[mesh.ndim]):
        for kind in range(3):
            differentiate(mesh, placements, kind, n + kind)


def features(kind: int, batch: int, heads: int, rows: int, keys: int) -> dict[str, Any]:
    """Arguments that depend on sequences, heads and rows."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(kind))

    return [
        {"causal": True, "window": (9, 2), "sinks": random(heads), "bias": random(batch, heads, rows, keys)},
        {
            "alibi_slopes": random(batch, heads).abs(),
            "dropout_p": 0.3,
            "dropout_seed": 5,
            "bias": random(1, 1, rows, 1),
        },
        {
            "score_mod": ScoreFunction(lambda s, b, h, i, j: s + 2**-7 * (i - 2 * j) * (h + 1) + b),
            "mask": MaskFunction(lambda b, h, i, j: (i * 3 + j + b + h) % 4 != 0),
            "sinks": random(heads),
        },
    ][kind]


def differentiate(mesh: DeviceMesh, placements: list[Placement], kind: int, variant: int) -> None:
    """A call of DTensors against the oracle: key heads that are sharded or not, features as plain tensors or not."""
    parts = [torch.Size(mesh.size(n) for n, p in enumerate(placements) if p == kind).numel() for kind in (HEADS, ROWS)]
    even = placements.count(ROWS) > 1  # heads are exchanged over one of the dimensions
    heads = [(4 * parts[0], 2 * parts[0]), (4 * parts[0], 1), (3 * (1 + even) * parts[0], 3)][variant % 3]
    rows, keys = (4 * parts[1], 2 * parts[1]) if even else (13, 11)
    case = dense_case(3, rows, keys, heads=heads, seed=variant, **features(kind, 3, heads[0], rows, keys))
    plain = ("sinks", "bias", "alibi_slopes") if variant % 2 else ()
    leaves, arguments = {}, dict(case.arguments)
    for name, x in case.differentiable().items():
        x = x.detach()
        if name not in plain:
            whole = name in "kv" and heads[1] % parts[0] != 0
            x = whole_as(x, mesh, [placement_in(name, x, p, HEADS if whole else None) for p in placements])
        leaves[name] = arguments[name] = x.requires_grad_()
    for name, value in arguments.items():
        if isinstance(value, ScoreFunction | MaskFunction):
            arguments[name] = value.fn
    call = attention if variant % 2 else flashtile.attention
    out, lse = call(**arguments, return_lse=True)
    assert isinstance(out, DTensor)
    assert out.placements == lse.placements == tuple(placements)
    incoming = [whole_as(x, mesh, placements) for x in (case.dout, case.dlse)]
    gradients = torch.autograd.grad((out, lse), [*leaves.values()], incoming)
    found = {"out": out, "lse": lse} | {f"d{name}": dx for name, dx in zip(leaves, gradients, strict=True)}
    for name in plain:  # of this rank's part
        for n, p in enumerate(placements):
            if p != ALL and f"d{name}" in found:
                dist.all_reduce(found[f"d{name}"], group=mesh.get_group(n))
    check(case, {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in found.items()})


def placement_in(name: str, x: Tensor, of_q: Placement, replicated: Placement | None) -> Placement:
    """The placement of a tensor on a dimension of the mesh, from that of q."""
    if not isinstance(of_q, Shard) or of_q == replicated:
        return ALL
    dim = LETTERS.get(name, "BHS").find("BHS"[of_q.dim])
    return Shard(dim) if dim >= 0 and x.shape[dim] > 1 else ALL


def other_layout(mesh: DeviceMesh) -> None:
    """DTensors whose rows are in the order of a layout, after an operation that communicates."""
    size = mesh.size()
    case = dense_case(1, 4 * size, 4 * size, causal=True)
    tensors = []
    for name in "qkv":
        local = shard(case.arguments[name], mesh, 2, layout="zigzag")
        x = DTensor.from_local(local, mesh, [ROWS], run_check=False)
        tensors.append(x.redistribute(placements=[HEADS]).redistribute(placements=[ROWS]))
    out = attention(*tensors, layout="zigzag", causal=True, scheme="ring", check=True)
    assert isinstance(out, DTensor)
    check(case, {"out": unshard(out.to_local(), mesh, 2, layout="zigzag")})


def within_context(mesh: DeviceMesh) -> None:
    """Heads are sharded by DTensors over one dimension of a mesh, the sequence by a context over the other one."""
    rows, heads = part_of_mesh(mesh, (0,)), part_of_mesh(mesh, (1,))
    size = rows.size()
    case = dense_case(2, 6 * size, 6 * size, heads=(2 * heads.size(), 1), causal=True, dropout_p=0.3, dropout_seed=5)
    local = [shard(case.arguments[name], rows, 2) for name in "qkv"]
    tensors = [whole_as(x, heads, [HEADS if x.shape[1] > 1 else ALL]) for x in local]
    cut = [whole_as(x, heads, [ROWS]) for x in local]
    with context_parallel(rows), pytest.raises(flashtile.ArgumentError, match="mesh"):
        flashtile.attention(*cut)
    with context_parallel(rows):
        out = flashtile.attention(*tensors, causal=True, dropout_p=0.3, dropout_seed=5)
    assert isinstance(out, DTensor)
    check(case, {"out": unshard(out.full_tensor(), rows, 2)})


def refused(mesh: DeviceMesh) -> None:
    whole = torch.randn(2, 4 * mesh.size(), 8 * mesh.size(), D)

    def place(*placements: Placement, x: Tensor = whole) -> DTensor:
        return DTensor.from_local(x, mesh, placements, run_check=False)

    rows, same = whole_as(whole, mesh, [ROWS]), place(ALL)
    odd = whole_as(whole[:, :, :-1], mesh, [ROWS])
    uneven_heads = whole_as(whole[:, :-1], mesh, [HEADS])
    three = place(ALL, x=whole[:, :3])
    by_batch = whole_as(torch.cat([whole] * mesh.size()), mesh, [BATCH])
    captured = flashtile.MaskMod(lambda b, h, i, j, t: t[b] > i, (place(ALL, x=whole[:, 0, 0, 0]),))
    wrong: list[tuple[Any, str]] = [
        ({"q": place(Partial()), "k": place(Partial()), "v": place(Partial())}, "`q`.*placed as .*Partial"),
        ({"q": place(Shard(3)), "k": place(Shard(3)), "v": place(Shard(3))}, "Shard\\(dim=3\\)"),
        ({"q": rows, "k": same, "v": same}, "`k`"),
        ({"q": rows, "k": rows, "v": same}, "`v`"),
        ({"q": rows, "k": rows, "v": whole}, "`v`"),
        ({"q": whole, "k": rows, "v": rows}, "`q`"),
        ({"q": rows, "k": rows, "v": rows, "length": 3}, "length"),
        ({"q": odd, "k": odd, "v": odd, "layout": "zigzag"}, "zigzag"),
        ({"q": uneven_heads, "k": uneven_heads, "v": uneven_heads}, "heads"),
        ({"q": rows, "k": rows, "v": rows, "sinks": place(Shard(0), x=whole[0, :, 0, 0])}, "sinks"),
        ({"q": rows, "k": rows, "v": rows, "bias": place(Partial(), x=whole[:1, :1, :1, :1])}, "bias"),
        ({"q": rows, "k": rows, "v": rows, "dropout_p": 0.5}, "dropout_seed"),
        ({"q": place(HEADS), "k": three, "v": three}, "heads"),
        ({"q": by_batch, "k": rows, "v": rows}, "`k`"),
        ({"q": by_batch, "k": by_batch, "v": by_batch, "bias": whole[:, :1, :, :1]}, "bias"),
        ({"q": rows, "k": rows, "v": rows, "mask": captured}, "mask"),
    ]
    for arguments, words in wrong:
        with pytest.raises(flashtile.ArgumentError, match=words):
            attention(**arguments)
    with pytest.raises(flashtile.ArgumentError, match="mesh"):
        attention(whole, whole, whole)
    with pytest.raises(flashtile.AttentionError, match="attention_varlen has no"):
        flashtile.attention_varlen(rows[0], rows[0], rows[0], [0, 8], [0, 8])
