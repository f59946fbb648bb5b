"""Sharded calls under torch.compile: one graph, with the results of eager calls to the bit."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo.backends.debugging  # before the processes fork, which then share it
from gathered import HEADS, KV_HEADS, D
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import flashtile
import flashtile.compat.torch
import flashtile.nn
from flashtile.distributed import attention, attention_varlen, balanced, context_parallel, shard

ROWS = 24


def calls(meshes: Sequence[DeviceMesh]) -> None:
    features(meshes[0])
    places(meshes)
    packed(meshes[0])
    in_context(meshes[0])
    pytorchs_function(meshes[0])
    refused(meshes[0])


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
    """Features whose tensors have gradients, where keys travel and where heads do."""
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

    def ulysses(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return 2 * attention(q, k, v, mesh=mesh, layout=layout, scheme="ulysses", mask=lists, bias=bias, check=True)  # type: ignore[operator]

    zigzag, pieces = ([shard(x, mesh, 2, layout=name) for x in whole] for name in ("zigzag", layout))
    same(recomputed, compiled(recomputed), *zigzag, sinks, captured=(table,))
    same(ulysses, compiled(ulysses, "eager"), *pieces, bias)


def plus_table(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, table: Tensor) -> Tensor:
    return s + table[h] * ((i - j) % 5)


def places(meshes: Sequence[DeviceMesh]) -> None:
    """Another length, mesh or layout of a call that has been compiled."""

    def call(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh, layout: Any, length: int) -> Any:
        return attention(q, k, v, mesh=mesh, layout=layout, length=length, causal=True)

    graph = compiled(call, "eager")
    for length, n, layout in ((24, 0, "zigzag"), (29, 1, "zigzag"), (29, 0, balanced(2, 29, chunk=4))):
        local = [shard(random(1, 2, length, D), meshes[n], 2, layout=layout, length=length) for _ in range(3)]
        assert torch.equal(call(*local, meshes[n], layout, length), graph(*local, meshes[n], layout, length))


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


def in_context(mesh: DeviceMesh) -> None:
    """The public functions in one graph, for each context that it is called in."""
    layer = flashtile.nn.Attention(HEADS * D, HEADS, num_kv_heads=KV_HEADS, causal=True, rotary_dim=D).double()
    x, rows = random(2, ROWS, HEADS * D), torch.arange(ROWS)
    offsets, graphs = torch.tensor([0, 5, ROWS], dtype=torch.int32), []

    def call(x: Tensor, positions: Tensor) -> Tensor:
        x = layer(x, positions=positions).unflatten(2, (HEADS, D))
        y = flashtile.attention_varlen(x[0], x[1], x[1], offsets, offsets, max_seqlen_q=19, causal=True)
        z = flashtile.attention(*[x.transpose(1, 2)] * 3, num_splits=None, window=(7, 2))
        return y.transpose(0, 1) + z[1]

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    graph = compiled(call, count)
    for layout in ("zigzag", balanced(mesh, ROWS, causal=True, chunk=5), "zigzag", None):
        local = [y if layout is None else shard(y, mesh, dim, layout=layout) for y, dim in ((x, 1), (rows, 0))]
        with nullcontext() if layout is None else context_parallel(mesh, layout=layout):
            same(lambda x, local=local: call(x, local[1]), lambda x, local=local: graph(x, local[1]), local[0])
    local = [shard(x, mesh, 1, layout="zigzag").requires_grad_(), shard(rows, mesh, 0, layout="zigzag")]
    renamed = DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=("ranks",))
    for same_ranks in (mesh, renamed, mesh):
        with context_parallel(same_ranks, layout="zigzag"):
            graph(*local)
    assert len(graphs) == 4  # of two layouts, outside, and of a mesh with another name
    refusal = pytest.raises(flashtile.AttentionError, match="outside of it")
    with context_parallel(mesh, layout="zigzag"), ThreadPoolExecutor(1) as pool, refusal:
        pool.submit(graph, *local).result()


def pytorchs_function(mesh: DeviceMesh) -> None:
    """`scaled_dot_product_attention` in a context, whose graph is refused outside of it."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q * 2, k, v, is_causal=True).sin()

    graph, local = compiled(call), [shard(random(1, HEADS, ROWS, D), mesh, 2, layout="zigzag") for _ in range(3)]
    with flashtile.compat.torch.activate():
        with context_parallel(mesh, layout="zigzag"):
            same(call, graph, *local)
        with pytest.raises(flashtile.AttentionError, match="outside of it"):
            graph(*[x.requires_grad_() for x in local])


def refused(mesh: DeviceMesh) -> None:
    x = random(1, 2, 8, D)
    dtensor = DTensor.from_local(x, mesh, [Shard(2)], run_check=False)
    wrong: list[tuple[Tensor, dict[str, Any], str]] = [
        (x, {"layout": "other"}, "layout"),
        (dtensor, {}, "DTensor"),
    ]
    for q, given, words in wrong:
        with pytest.raises(Exception, match=words):
            compiled(lambda q, given=given: attention(q, q, q, mesh=mesh, **given), "eager")(q)
