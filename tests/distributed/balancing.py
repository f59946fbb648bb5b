"""Layouts with pieces of any order, and masks that are lists of blocks, in every way to make a sharded call."""

from typing import Any

import pytest
import torch
from gathered import check, dense_case, run_local
from in_contexts import with_lse
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import create_block_mask
from with_dtensors import whole_as

import flashtile
from flashtile.distributed import Layout, attention, attention_varlen, balanced, context_parallel, explain, shard
from flashtile.distributed.layout import Piece
from flashtile.testing.case import MaskFunction

ROWS, BLOCK = 41, 8


def calls(mesh: DeviceMesh) -> None:
    poisoned_lists(mesh)
    in_context(mesh)
    of_dtensors(mesh)
    explained(mesh)
    refused(mesh)


def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A document from 20 on, of which one block of keys is hidden from all rows."""
    return ((i < 20) == (j < 20)) & (i >= j) & (j // BLOCK != 3)


def poisoned_lists(mesh: DeviceMesh) -> None:
    """Keys that no row sees are NaN, in PyTorch's lists and in ours, for parts that cut blocks anywhere."""
    layout = balanced(mesh.size(), ROWS, mask=seen, chunk=3)
    flex = create_block_mask(seen, 1, 1, ROWS, ROWS, device="cpu", BLOCK_SIZE=BLOCK)
    case = dense_case(2, ROWS, ROWS, heads=(2 * mesh.size(), 2), mask=MaskFunction(seen))
    case.arguments["k"][:, :, 3 * BLOCK : 4 * BLOCK] = torch.nan
    for mask, scheme in ((flex, "ring"), (flashtile.BlockMask.of_flex(flex), "gather"), (flex, "ulysses")):
        given = {"mask": mask, "scheme": scheme, "mesh": mesh, "layout": layout, "check": True, "return_lse": True}

        def call(given: dict[str, Any] = given, **arguments: Any) -> Any:
            return attention(**arguments | given)

        results = run_local(case, mesh, layout, call)
        check(case, {name: x for name, x in results.items() if name != "dq"})  # 0 * NaN is in a product of hidden keys


def in_context(mesh: DeviceMesh) -> None:
    layout = balanced(mesh, ROWS, causal=True, chunk=5)
    case = dense_case(1, ROWS, ROWS, heads=(2 * mesh.size(), 2), causal=True)
    check(case, run_local(case, mesh, layout, with_lse, context=context_parallel(mesh, layout=layout)))


def of_dtensors(mesh: DeviceMesh) -> None:
    """Shards of equal lengths in the order of a layout; lists of blocks with heads that are sharded."""
    rows = 6 * mesh.size()
    layout = balanced(mesh, rows, causal=True, chunk=3)
    case = dense_case(1, rows, rows, causal=True)
    tensors = [shard(case.arguments[name], mesh, 2, layout=layout) for name in "qkv"]
    out = attention(
        *(DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in tensors), layout=layout, causal=True
    )
    assert isinstance(out, DTensor)
    torch.testing.assert_close(out.to_local(), attention(*tensors, mesh=mesh, layout=layout, causal=True))
    heads = 2 * mesh.size()

    def of_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i + h) % 3 != j % 3

    case = dense_case(1, ROWS, ROWS, heads=(heads, heads), mask=MaskFunction(of_heads))
    mask = create_block_mask(of_heads, 1, heads, ROWS, ROWS, device="cpu", BLOCK_SIZE=BLOCK)
    out = attention(*(whole_as(case.arguments[name], mesh, [Shard(1)]) for name in "qkv"), mask=mask)
    assert isinstance(out, DTensor)
    check(case, {"out": out.full_tensor()})


def explained(mesh: DeviceMesh) -> None:
    size = mesh.size()
    q = torch.randn(1, 2 * size, 64, 16)
    found = explain(q, q, q, mesh=mesh, causal=True)
    assert found.imbalance == pytest.approx({"contiguous": 2 - 1 / size, "zigzag": 1, "balanced": 1}, rel=0.02)
    assert "contiguous 1." in str(found)
    offsets = [0, 32 * size, *range(40 * size, 65 * size, 8 * size)]
    layout = balanced(mesh, 64 * size, cu_seqlens=offsets)
    tokens = q[0].transpose(0, 1)
    packed = explain(tokens, tokens, tokens, mesh=mesh, layout=layout, cu_seqlens_q=offsets)
    assert packed.layout == "balanced"
    assert packed.imbalance["balanced"] < packed.imbalance["contiguous"]
    lists = create_block_mask(seen, 1, 1, 64 * size, 64 * size, device="cpu", BLOCK_SIZE=BLOCK)
    assert explain(q, q, q, mesh=mesh, mask=lists).imbalance["contiguous"] > found.imbalance["balanced"]


def refused(mesh: DeviceMesh) -> None:
    size = mesh.size()
    x = torch.randn(1, 2, 8, 16)
    lists = create_block_mask(seen, 1, 1, 8 * size, 8 * size, device="cpu", BLOCK_SIZE=BLOCK)
    longer = create_block_mask(seen, 1, 1, 8 * size + 8, 8 * size, device="cpu", BLOCK_SIZE=BLOCK)
    for check_ranks in (False, True):
        with pytest.raises(flashtile.ArgumentError, match="these are for"):
            attention(x, x, x, mesh=mesh, mask=longer, check=check_ranks)
    with pytest.raises(flashtile.ArgumentError, match="seqlens"):
        attention_varlen(*[x[0].transpose(0, 1)] * 3, [0, 8 * size], mesh=mesh, mask=lists)
    for layout in (
        balanced(size + 1, 8 * size),
        Layout("balanced", 8 * size, size, ((Piece(0, 8 * size),),) * size),
        Layout("balanced", 8 * size, size),
    ):
        with pytest.raises(flashtile.ArgumentError, match="layout"):
            attention(x, x, x, mesh=mesh, layout=layout)
        with pytest.raises(flashtile.ArgumentError, match="layout"):
            shard(torch.cat([x] * size, dim=2), mesh, 2, layout=layout)
    with pytest.raises(flashtile.ArgumentError, match="layout"):
        shard(x, mesh, 2, layout=balanced(size, 9))
    with pytest.raises(flashtile.ArgumentError, match="rows on rank"):
        attention(x, x[:, :, :7], x[:, :, :7], mesh=mesh, layout=balanced(size, 8 * size))
