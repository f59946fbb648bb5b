"""The Triton backend's entries: results are allocated, arguments packed, kernels launched on the tensors' device."""

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from ...cache import CacheTensors
from ...cache import append_and_rotate as in_operations
from ...call import Call, Gradients, Needs, memory_of, new_rows
from ...plan import Plan
from ...problem import power_of_two
from ..common.arguments import dlse_strides, lse_strides, new_results, rows_last, strides
from ..common.gradients import sink_gradient, sum_to_heads
from ..common.launch import launch, on_device
from . import arguments as args
from .append import append_kernel
from .backward import delta_kernel, dkdv_kernel
from .backward_rows import dq_kernel
from .bias_gradient import dbias_kernel
from .combine import combine_kernel
from .forward import forward_kernel
from .tables import Launch

ROWS_AT_ONCE = 64


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    t = call.tensors
    q, k, v = rows_last(t.q), rows_last(t.k), rows_last(t.v)
    out, lse = new_results(call, q, v.shape[-1])
    launch_shape: Launch = plan.tile.forward
    pack, splits = plan.tile.pack, call.settings.num_splits or plan.num_splits
    found, found_lse = out, lse
    if splits > 1:
        # The parts' results have the rows of lse: [splits, B, H, S, Dv] or [splits, H, T, Dv].
        found_lse = lse.new_empty((splits, *lse.shape))
        found = lse.new_empty((*found_lse.shape, v.shape[-1]))

    def numbers() -> tuple[int, dict[str, Any]]:
        part = out if splits == 1 else found[0] if out.dim() == 4 else found[0].transpose(0, 1)
        align = args.alignment([q, k, v, part])
        tiles = args.num_tiles(call, launch_shape.block_m, pack)
        programs = tiles * (q.shape[1] // pack) * args.dense_batch(q) * splits
        return programs, {
            **args.inputs(call, q, k, v, align),
            **strides("out", part, align),
            **lse_strides(lse),
            **args.tiled(launch_shape, tiles),
            "stride_out_split": found.stride(0),
            "stride_lse_split": found_lse.stride(0),
            "PACK": pack,
            "SPLITS": splits,
        }

    def numbers_of_parts() -> tuple[int, dict[str, Any]]:
        return lse.numel(), {
            **strides("out", out, 1),
            **lse_strides(lse),
            "stride_lse_split": found_lse.stride(0),
            "num_heads_q": q.shape[1],
            "total_q": lse.shape[-1],
            "DV": v.shape[-1],
            "WIDTH": power_of_two(v.shape[-1]),
            "SPLITS": splits,
            "PARTS": power_of_two(splits),
            "num_warps": 4,
        }

    signature = (plan.tile, splits, args.precision(q.dtype), call.signature())
    pointers = args.pointers(call, q, k, v)
    pointers |= {"sinks": t.sinks, "out": found, "lse": found_lse}
    with on_device(q):
        launch(forward_kernel, signature, pointers, numbers)
        if splits > 1:
            parts: dict[str, Tensor | None] = {"partial_out": found, "partial_lse": found_lse, "out": out, "lse": lse}
            launch(combine_kernel, signature, parts, numbers_of_parts)
    return out, lse


def append_and_rotate(call: Call, cache: CacheTensors, interleaved: bool) -> Call:
    """As `flashtile.cache.append_and_rotate`, in one launch instead of some thirty operations."""
    if cache.k is None and cache.rotary_cos is None:
        return call
    t = call.tensors
    assert t.page_table is not None
    # A copy of the cache would not be the cache; and a table without columns has nothing to look at.
    if t.k.stride(-1) != 1 or t.v.stride(-1) != 1 or t.page_table.shape[1] == 0:
        return in_operations(call, cache, interleaved)
    q = rows_last(t.q)
    turned = None if cache.rotary_cos is None else new_rows(q, q.shape[1], q.shape[-1], q.dtype)
    given = (cache.k, cache.v, cache.rotary_cos, cache.rotary_sin)
    new_k, new_v, cos, sin = [None if x is None else rows_last(x) for x in given]
    pointers = {
        "q": q,
        "turned": turned,
        "k_cache": t.k,
        "v_cache": t.v,
        "new_k": new_k,
        "new_v": new_v,
        "cos": cos,
        "sin": sin,
        "lengths": cache.cache_seqlens,
        "page_table": rows_last(t.page_table),
        "cu_seqlens_q": t.cu_seqlens_q,
    }

    def numbers() -> tuple[int, dict[str, Any]]:
        given = args.new_tokens(call, pointers)
        programs = given["num_tiles"] * (given["num_heads_q"] + given["num_heads_k"]) * args.dense_batch(q)
        return programs, given | {"INTERLEAVED": interleaved, "num_warps": 1}

    with on_device(q):
        launch(append_kernel, (interleaved, call.signature()), pointers, numbers)
    return call if turned is None else Call(t._replace(q=turned), call.settings, call.signature())


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    q, k, v, out = (rows_last(x) for x in (*call.tensors[:3], out))
    lse = lse.contiguous()
    dout = out.new_zeros(out.shape[-1]).expand(out.shape) if dout is None else rows_last(dout)
    given = (plan.tile, args.precision(q.dtype), call.signature())
    pass_ = BackwardPass(call, (*given, *map(memory_of, (out, dout, dlse))), q, k, v, dout)
    with on_device(q):
        pass_.prepare_rows(out, lse, dlse)
        dk, dv = pass_.keys(plan.tile.dkdv) if needs.k or needs.v else (None, None)
        slopes = needs.alibi_slopes
        dq, dslopes = pass_.rows(plan.tile.dq, lse, slopes) if needs.q or slopes else (None, None)
        dbias = pass_.bias(plan.tile.dq) if needs.bias else None
        dsinks = sink_gradient(call, lse, pass_.delta) if needs.sinks else None
    return Gradients(
        q=dq if needs.q else None,
        k=in_pages(call, k, dk) if needs.k and dk is not None else None,
        v=in_pages(call, v, dv) if needs.v and dv is not None else None,
        bias=dbias,
        alibi_slopes=None if dslopes is None else slope_gradient(call, dslopes),
        sinks=dsinks,
    )


class BackwardPass:
    """The launches of one backward pass, and what they have in common."""

    def __init__(self, call: Call, signature: Hashable, q: Tensor, k: Tensor, v: Tensor, dout: Tensor):
        self.call, self.signature = call, signature
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.pointers = {**args.pointers(call, q, k, v), "dout": dout}
        self.numbers_of_rows = dout  # set by prepare_rows

    def inputs(self, *results: Tensor) -> tuple[dict[str, Any], int]:
        """What every kernel takes, and the alignment in whose units strides come."""
        align = args.alignment([self.q, self.k, self.v, self.dout, *results])
        return {
            **args.inputs(self.call, self.q, self.k, self.v, align),
            **strides("dout", self.dout, align),
            **args.number_strides(self.numbers_of_rows),
        }, align

    @property
    def delta(self) -> Tensor:
        """`[B, H, S]` or `[H, T]`."""
        return self.numbers_of_rows[..., : self.dout.shape[-2 if self.dout.dim() == 4 else 0], 1]

    def prepare_rows(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        """Two numbers a row, `[B, H, S, 2]` or `[H, T, 2]` with an even S or T (`backward.delta_kernel`)."""
        *leading, total_q = lse.shape
        self.numbers_of_rows = lse.new_empty((*leading, total_q + total_q % 2, 2))

        def numbers() -> tuple[int, dict[str, Any]]:
            align = args.alignment([out, self.dout])
            tiles = -(-total_q // ROWS_AT_ONCE)
            return tiles * (lse.numel() // max(total_q, 1)), {
                **strides("out", out, align),
                **strides("dout", self.dout, align),
                **lse_strides(lse),
                **dlse_strides(dlse),
                **args.number_strides(self.numbers_of_rows),
                **args.chunks("DV", out.shape[-1]),
                "num_tiles": tiles,
                "num_heads_q": out.shape[1],
                "total_q": total_q,
                "ALIGN": align,
                "BLOCK_M": ROWS_AT_ONCE,
                "num_warps": 4,
            }

        pointers = {"out": out, "dout": self.dout, "lse": lse, "dlse": dlse, "numbers": self.numbers_of_rows}
        launch(delta_kernel, self.signature, pointers, numbers)
        self.pointers["numbers"] = self.numbers_of_rows.view(torch.int64)

    def keys(self, shape: Launch) -> tuple[Tensor, Tensor]:
        """dk and dv, by position where keys are paged."""
        dk, dv = (new_key_rows(self.call, x) for x in (self.k, self.v))

        def numbers() -> tuple[int, dict[str, Any]]:
            given, align = self.inputs(dk, dv)
            tiles = args.num_key_tiles(self.call, shape.block_n)
            return tiles * args.num_heads_k(self.call) * args.dense_batch(dk), {
                **given,
                **strides("dk", dk, align, keys=True),
                **strides("dv", dv, align, keys=True),
                **args.tiled(shape, tiles),
                "scale": self.call.settings.scale,
            }

        launch(dkdv_kernel, self.signature, {**self.pointers, "dk": dk, "dv": dv}, numbers)
        return dk, dv

    def rows(self, shape: Launch, lse: Tensor, slopes: bool) -> tuple[Tensor, Tensor | None]:
        """dq, and what each row gives to its slope, shaped as lse."""
        dq = new_rows(self.q, self.q.shape[1], self.q.shape[-1], self.q.dtype)
        dslopes = torch.empty_like(lse) if slopes else None

        def numbers() -> tuple[int, dict[str, Any]]:
            given, align = self.inputs(dq)
            tiles = args.num_tiles(self.call, shape.block_m)
            return tiles * dq.shape[1] * args.dense_batch(dq), {
                **given,
                **strides("dq", dq, align),
                **lse_strides(dslopes),
                **args.tiled(shape, tiles),
                "scale": self.call.settings.scale,
            }

        launch(dq_kernel, (slopes, self.signature), {**self.pointers, "dq": dq, "dslopes": dslopes}, numbers)
        return dq, dslopes

    def bias(self, shape: Launch) -> Tensor:
        """dbias, fp32 and shaped as the bias."""
        bias = self.call.tensors.bias
        assert bias is not None
        tiles = args.bias_tiles(self.call, bias, shape)
        dbias = torch.zeros((tiles["splits"], *bias.shape), dtype=torch.float32, device=bias.device)

        def numbers() -> tuple[int, dict[str, Any]]:
            given, _ = self.inputs()
            return tiles.pop("programs"), {**given, **tiles, **args.dbias_strides(dbias)}

        launch(dbias_kernel, self.signature, {**self.pointers, "dbias": dbias}, numbers)
        return dbias.sum(dim=0)


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


def new_key_rows(call: Call, x: Tensor) -> Tensor:
    """Uninitialised gradients for k or v. Pages may be shared: theirs come by position first, `[B, H, S, D]`."""
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
