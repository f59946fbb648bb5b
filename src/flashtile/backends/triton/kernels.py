"""The Triton backend's two entries: results are allocated, arguments packed, kernels launched on the tensors' device."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ...cache import CacheTensors
from ...cache import append_and_rotate as in_operations
from ...call import Call, Gradients, Needs, new_rows
from ...plan import Plan
from ...problem import power_of_two
from . import arguments as args
from .append import append_kernel
from .backward import delta_kernel, dkdv_kernel
from .backward_rows import dq_kernel
from .bias_gradient import dbias_kernel
from .combine import combine_kernel
from .forward import forward_kernel
from .tables import Launch

MOST_BIAS_SPLITS = 16


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    q, k, v = (args.rows_last(x) for x in call.tensors[:3])
    out = new_rows(q, q.shape[1], v.shape[-1], q.dtype)
    lse = q.new_empty(args.lse_shape(q), dtype=torch.float32)
    splits = call.settings.num_splits or plan.num_splits
    if splits > 1:
        # The parts' results have the rows of lse: [splits, B, H, S, Dv] or [splits, H, T, Dv].
        partial_lse = lse.new_empty((splits, *lse.shape))
        partial_out = lse.new_empty((*partial_lse.shape, v.shape[-1]))
    else:
        partial_lse, partial_out = lse[None], None
    found = out if partial_out is None else partial_out[0] if out.dim() == 4 else partial_out[0].transpose(0, 1)
    launch: Launch = plan.tile.forward
    pack = plan.tile.pack
    align = args.alignment([q, k, v, found])
    tiles = args.num_tiles(call, launch.block_m, pack)
    programs = tiles * (q.shape[1] // pack) * args.dense_batch(q) * splits
    if programs == 0:
        return out, lse
    with on_device(q):
        forward_kernel[(programs,)](
            **args.inputs(call, q, k, v, align),
            **args.rows("out", found, align),
            **args.lse_rows("lse", partial_lse[0]),
            **args.tiled(launch, tiles),
            sinks=call.tensors.sinks,
            stride_out_split=0 if partial_out is None else partial_out.stride(0),
            stride_lse_split=partial_lse.stride(0),
            PACK=pack,
            SPLITS=splits,
        )
        if partial_out is not None:
            rows_of_lse = args.lse_rows("lse", lse)
            combine_kernel[(lse.numel(),)](
                **args.rows("out", out, 1),
                **rows_of_lse,
                partial_out=partial_out,
                partial_lse=partial_lse,
                stride_lse_split=partial_lse.stride(0),
                num_heads_q=q.shape[1],
                total_q=lse.shape[-1],
                DV=v.shape[-1],
                WIDTH=power_of_two(v.shape[-1]),
                SPLITS=splits,
                PARTS=power_of_two(splits),
                num_warps=4,
            )
    return out, lse


def append_and_rotate(call: Call, cache: CacheTensors, interleaved: bool) -> Call:
    """As `flashtile.cache.append_and_rotate`, in one launch instead of some thirty operations."""
    if cache.k is None and cache.rotary_cos is None:
        return call
    t = call.tensors
    if t.k.stride(-1) != 1 or t.v.stride(-1) != 1:  # a copy of the cache would not be the cache
        return in_operations(call, cache, interleaved)
    q = args.rows_last(t.q)
    turned = None if cache.rotary_cos is None else new_rows(q, q.shape[1], q.shape[-1], q.dtype)
    given = args.new_tokens(call, cache, q, turned)
    programs = given["num_tiles"] * (given["num_heads_q"] + given["num_heads_k"]) * args.dense_batch(q)
    if programs > 0:
        with on_device(q):
            append_kernel[(programs,)](**given, INTERLEAVED=interleaved, num_warps=1)
    return call if turned is None else call._replace(tensors=t._replace(q=turned))


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    q, k, v, out = (args.rows_last(x) for x in (*call.tensors[:3], out))
    lse = lse.contiguous()
    dout = out.new_zeros(out.shape[-1]).expand(out.shape) if dout is None else args.rows_last(dout)
    dq = new_rows(q, q.shape[1], q.shape[-1], q.dtype) if needs.q or needs.alibi_slopes else None
    dk, dv = (new_key_rows(call, x) for x in (k, v)) if needs.k or needs.v else (None, None)
    align = args.alignment([x for x in (q, k, v, out, dout, dq, dk, dv) if x is not None])
    with on_device(q):
        numbers = row_numbers(out, dout, lse, dlse, align)
        given = {
            **args.inputs(call, q, k, v, align),
            **args.rows("dout", dout, align),
            **args.number_rows(numbers.view(torch.int64)),
        }
        if dk is not None and dv is not None:
            launch_dkdv(plan.tile.dkdv, call, given, dk, dv, align)
        dslopes = torch.empty_like(lse) if needs.alibi_slopes else None
        if dq is not None:
            launch_dq(plan.tile.dq, call, given, dq, dslopes, align)
        dbias = launch_dbias(plan.tile.dq, call, given) if needs.bias else None
    return Gradients(
        q=dq if needs.q else None,
        k=in_pages(call, k, dk) if needs.k and dk is not None else None,
        v=in_pages(call, v, dv) if needs.v and dv is not None else None,
        bias=dbias,
        alibi_slopes=None if dslopes is None else slope_gradient(call, dslopes),
        sinks=sink_gradient(call, lse, numbers[..., : lse.shape[-1], 1]) if needs.sinks else None,
    )


def row_numbers(out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, align: int) -> Tensor:
    """Two numbers a row, `[B, H, S, 2]` or `[H, T, 2]` with an even S or T (`backward.delta_kernel`)."""
    *leading, total_q = lse.shape
    numbers = lse.new_empty((*leading, total_q + total_q % 2, 2))
    block = 64
    tiles = -(-total_q // block)
    programs = tiles * (lse.numel() // max(total_q, 1))
    if programs > 0:
        delta_kernel[(programs,)](
            **args.rows("out", out, align),
            **args.rows("dout", dout, align),
            **args.lse_rows("lse", lse),
            **args.lse_gradient(dlse),
            **args.number_rows(numbers),
            **args.chunks("DV", out.shape[-1]),
            num_tiles=tiles,
            num_heads_q=out.shape[1],
            total_q=total_q,
            ALIGN=align,
            BLOCK_M=block,
            num_warps=4,
        )
    return numbers


def launch_dkdv(launch: Launch, call: Call, given: dict[str, Any], dk: Tensor, dv: Tensor, align: int) -> None:
    tiles = args.num_key_tiles(call, launch.block_n)
    programs = tiles * args.num_heads_k(call) * args.dense_batch(dk)
    if programs > 0:
        dkdv_kernel[(programs,)](
            **given,
            **args.rows("dk", dk, align, keys=True),
            **args.rows("dv", dv, align, keys=True),
            **args.tiled(launch, tiles),
            scale=call.settings.scale,
        )


def launch_dq(
    launch: Launch, call: Call, given: dict[str, Any], dq: Tensor, dslopes: Tensor | None, align: int
) -> None:
    tiles = args.num_tiles(call, launch.block_m)
    programs = tiles * dq.shape[1] * args.dense_batch(dq)
    if programs > 0:
        dq_kernel[(programs,)](
            **given,
            **args.rows("dq", dq, align),
            **args.tiled(launch, tiles),
            **args.lse_rows("dslopes", dslopes),
            scale=call.settings.scale,
        )


def launch_dbias(launch: Launch, call: Call, given: dict[str, Any]) -> Tensor:
    bias = call.tensors.bias
    assert bias is not None
    full = args.pairs_shape(call)
    origin = call.settings.j0 % 8 if given["threshold"] is not None else 0
    blocks = (1, 1, launch.block_m, launch.block_n)
    counts = [-(-(n + (origin if dim == 3 else 0)) // block) for dim, (n, block) in enumerate(zip(full, blocks, strict=True))]
    own = [1 if n == 1 else count for n, count in zip(bias.shape, counts, strict=True)]
    shared = [count // mine if mine == 1 else 1 for mine, count in zip(own, counts, strict=True)]
    programs = own[0] * own[1] * own[2] * own[3]
    turns = shared[0] * shared[1] * shared[2] * shared[3]
    splits = max(1, min(MOST_BIAS_SPLITS, turns, 1024 // max(programs, 1)))
    dbias = torch.zeros((splits, *bias.shape), dtype=torch.float32, device=bias.device)
    steps = dict(zip("bhmn", zip(bias.shape, dbias.stride()[1:], strict=True), strict=True))
    if programs * turns > 0:
        dbias_kernel[(programs * splits,)](
            **given,
            dbias=dbias,
            stride_dbias_split=dbias.stride(0),
            **{f"stride_dbias_{x}": step if n > 1 or x in "bh" else None for x, (n, step) in steps.items()},
            tiles_h=own[1], tiles_m=own[2], tiles_n=own[3],
            shared_b=shared[0], shared_h=shared[1], shared_m=shared[2], shared_n=shared[3],
            bias_rows=bias.shape[2], bias_keys=bias.shape[3], splits=splits,
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, num_warps=launch.num_warps, num_stages=1,
        )  # fmt: skip
    return dbias.sum(dim=0)


def sink_gradient(call: Call, lse: Tensor, delta: Tensor) -> Tensor:
    """`dsink = -sum of p_sink * delta` over rows, `[H]`."""
    assert call.tensors.sinks is not None
    sinks = call.tensors.sinks.float()[:, None]  # [H, 1]
    p_sink = torch.where(lse == -torch.inf, 0, torch.exp(sinks - lse))  # [(B,) H, S]
    return -sum_to_heads(p_sink * delta)


def slope_gradient(call: Call, rows: Tensor) -> Tensor:
    """`[H]` or `[B, H]`, from what each row gives, shaped as lse."""
    slopes, cu_seqlens = call.tensors.alibi_slopes, call.tensors.cu_seqlens_q
    assert slopes is not None
    if slopes.dim() == 1:
        return sum_to_heads(rows)
    if cu_seqlens is None:
        return rows.sum(dim=-1)
    token = torch.arange(rows.shape[-1], device=rows.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)  # [T]; B for tokens of none
    total = rows.new_zeros((slopes.shape[0] + 1, slopes.shape[1]))
    return total.index_put_((sequence,), rows.t(), accumulate=True)[:-1]  # sorted, hence deterministic


def sum_to_heads(rows: Tensor) -> Tensor:
    """`[B, H, S]` or `[H, T]` to `[H]`."""
    return rows.sum(dim=(0, 2) if rows.dim() == 3 else 1)


def new_key_rows(call: Call, x: Tensor) -> Tensor:
    """Uninitialised gradients for k or v. Pages may be shared: their gradients come by position first, `[B, H, S, D]`."""
    if call.layout == "dense":
        return new_rows(x, x.shape[1], x.shape[-1], x.dtype)
    if call.layout == "varlen":
        return x.new_empty(x.shape)
    assert call.tensors.page_table is not None
    batch, columns = call.tensors.page_table.shape
    return x.new_empty((batch, x.shape[2], columns * x.shape[1], x.shape[-1]))


def in_pages(call: Call, pages: Tensor, by_position: Tensor) -> Tensor:
    """Gradients of pages `[P, page_size, H, D]`: the sum over all positions that lie there."""
    if call.layout != "paged":
        return by_position
    table, page_size = call.tensors.page_table, pages.shape[1]
    assert table is not None
    exists = (table >= 0) & (table < pages.shape[0])
    page = torch.where(exists, table.long(), pages.shape[0])  # [B, columns]; the spare page takes what is nowhere
    total = pages.new_zeros((pages.shape[0] + 1, *pages.shape[1:]), dtype=torch.float32)
    given = by_position.unflatten(2, (-1, page_size)).permute(0, 2, 3, 1, 4)  # [B, columns, page_size, H, D]
    return total.index_put_((page,), given.float(), accumulate=True)[:-1]  # sorted, hence deterministic


def on_device(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device and its current stream."""
    return torch.cuda.device(x.device) if x.device.type == "cuda" else contextlib.nullcontext()
