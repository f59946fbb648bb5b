"""Sharded calls under torch.compile: one graph, with the results of eager calls to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gathered import HEADS, KV_HEADS, D
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import flashtile
from flashtile.distributed import attention, attention_varlen, balanced, shard

ROWS = 24


def calls(mesh: DeviceMesh) -> None:
    features(mesh)
    lengths(mesh)
    packed(mesh)
    refused(mesh)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[-2]))


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Any:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


def same(function: Callable[..., Any], graph: Any, *tensors: Tensor, captured: tuple[Tensor, ...] = ()) -> None:
    """Results and gradients of eager and compiled calls. The graph goes on before and after attention."""
    found = []
    for call in (function, graph):
        leaves = [x.detach().requires_grad_() for x in tensors]
        results = call(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        found.append([*results, *torch.autograd.grad(sum(x.sin().sum() for x in results), [*leaves, *captured])])
    for n, (x, y) in enumerate(zip(*found, strict=True)):
        assert torch.equal(x, y), n


def features(mesh: DeviceMesh) -> None:
    """Features whose tensors have gradients, in each scheme."""
    rows = ROWS * mesh.size()
    whole = [random(2, heads, rows, D) for heads in (HEADS * mesh.size(), KV_HEADS, KV_HEADS)]
    num_heads = whole[0].shape[1]
    table, sinks, bias = random(num_heads, 1)[:, 0], random(num_heads, 1)[:, 0], random(1, 1, rows, rows)
    blocks = torch.ones(1, 1, -(-rows // 8), dtype=torch.int32)
    lists = flashtile.BlockMask(blocks, blocks.cumsum(2)[..., None] - 1, block_size=(8, 8), seqlens=(rows, rows))
    layout = balanced(mesh, rows, causal=True, chunk=5)

    mod = flashtile.ScoreMod(plus_table, (table.requires_grad_(),))

    def ring(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        given: dict[str, Any] = {"dropout_p": 0.3, "dropout_seed": 5, "return_lse": True, "sinks": sinks}
        return attention(q * 2, k, v, mesh=mesh, layout="zigzag", scheme="ring", causal=True, score_mod=mod, **given)

    def recomputed(*tensors: Tensor) -> Any:
        return checkpoint(ring, *tensors, use_reentrant=False)

    def gather(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return attention(q * 2, k, v, mesh=mesh, layout=layout, scheme="gather", window=(30, 3), bias=bias, check=True)

    def ulysses(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Any:
        return 2 * attention(q, k, v, mesh=mesh, layout=layout, scheme="ulysses", mask=lists, sinks=sinks)  # type: ignore[operator]

    zigzag, pieces = ([shard(x, mesh, 2, layout=name) for x in whole] for name in ("zigzag", layout))
    same(recomputed, compiled(recomputed), *zigzag, sinks, captured=(table,))
    same(gather, compiled(gather), *pieces, bias)
    same(ulysses, compiled(ulysses), *pieces, sinks)


def plus_table(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
    return s + table[h] * ((i - j) % 5)


def lengths(mesh: DeviceMesh) -> None:
    """Another length, mesh or layout of a call that has been compiled."""

    def call(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, layout: Any, length: int) -> Any:
        return attention(q, k, v, mesh=mesh, layout=layout, length=length, causal=True)

    graph = compiled(call, "eager")
    alone = DeviceMesh("cpu", torch.tensor([torch.distributed.get_rank()]))
    for length in (ROWS, ROWS + 5):
        for place in ((mesh, "zigzag"), (alone, "contiguous"), (mesh, balanced(mesh, length, chunk=4))):
            local = [shard(random(1, 2, length, D), place[0], 2, layout=place[1], length=length) for _ in range(3)]
            assert torch.equal(call(*local, *place, length), graph(*local, *place, length))


def packed(mesh: DeviceMesh) -> None:
    """Other offsets are no other graph, in lists and in tensors."""
    rows = ROWS * mesh.size()
    local = [shard(random(rows, 2, D), mesh, 0) for _ in range(3)]
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(offsets: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attention_varlen(q, k, v, offsets, mesh=mesh, causal=True, return_lse=True)

    graph = compiled(call, count)
    for kind in (list, torch.tensor):
        for n in (3, 7, 11):
            offsets: Any = kind([0, n, 2 * n, rows])  # type: ignore[operator]
            for x, y in zip(call(offsets, *local), graph(offsets, *local), strict=True):
                assert torch.equal(x, y)
    assert len(graphs) <= 3  # one for numbers that become symbols, one for tensors


def refused(mesh: DeviceMesh) -> None:
    x = random(1, 2, 8, D)
    dtensor = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    wrong: list[tuple[Tensor, dict[str, Any], str]] = [
        (x, {"layout": "other"}, "layout"),
        (x, {"scheme": "tree"}, "scheme"),
        (dtensor, {}, "DTensor"),
    ]
    for q, given, words in wrong:
        with pytest.raises(Exception, match=words):
            compiled(lambda q, given=given: attention(q, q, q, mesh=mesh, **given), "eager")(q)
