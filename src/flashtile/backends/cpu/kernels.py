"""The CPU backend's entries: results are allocated, arguments packed, a kernel is run on PyTorch's threads.

The generators are imported when a kernel has to be compiled.
"""

import ctypes
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs, lse_shape, new_rows
from ...plan import Plan
from ...problem import accumulation_dtype
from ...remember import remember
from ..common.arguments import rows_last
from . import arguments as args
from . import targets, threads, workspace
from .jit import function_address
from .targets import Target
from .variant import BACKWARD, FORWARD, Variant

MOST_LAUNCHES = 1024


@functools.lru_cache(maxsize=1024)
def forward_address(variant: Variant, target: Target) -> int:
    def source() -> str:
        from . import decode, forward

        return forward.source(variant, target, decode.Decode if variant.few else forward.Forward)

    return function_address(FORWARD, variant, target, source)


@functools.lru_cache(maxsize=1024)
def backward_address(variant: Variant, target: Target) -> int:
    def source() -> str:
        from . import backward

        return backward.source(variant, target)

    return function_address(BACKWARD, variant, target, source)


class Launch(NamedTuple):
    """A kernel and all that it is told, short of addresses."""

    function: Any
    block: Any
    most_threads: int
    work_size: int
    lengths: args.Lengths
    splits: int = 1
    results: tuple[args.Layout, ...] = ()


_LAUNCHES: dict[Hashable, Launch] = {}


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    t = call.tensors
    q, k, v = rows_last(t.q), rows_last(t.k), rows_last(t.v)
    # Dense calls of one signature are told the same; packed ones follow from the values of their lengths.
    key = (plan.tile, plan.num_splits, targets.asked(), call.signature()) if call.layout == "dense" else None
    launch = _LAUNCHES.get(key)
    if launch is None:
        out = new_rows(q, q.shape[1], v.shape[-1], q.dtype)
        lse = q.new_empty(lse_shape(q), dtype=accumulation_dtype(q.dtype))
        launch = forward_launch(plan, call, q, k, v, out, lse)
        if key is not None:
            remember(_LAUNCHES, key, launch, MOST_LAUNCHES)
    else:
        out, lse = (layout.new() for layout in launch.results)
    places, alive = args.addresses(call, q, k, v)
    places["out"], places["lse"] = out.data_ptr(), lse.data_ptr()
    if launch.splits > 1:
        shape = (launch.splits, *lse.shape)
        partial_out, partial_lse = lse.new_empty((*shape, v.shape[-1])), lse.new_empty(shape)
        places["partial_out"], places["partial_lse"] = partial_out.data_ptr(), partial_lse.data_ptr()
        run(launch, places)
        combine(partial_out, partial_lse, out if out.dim() == 4 else out.transpose(0, 1), lse)
    else:
        run(launch, places)
    del alive
    covered = launch.lengths.covered
    if q.dim() == 3 and covered < q.shape[0]:  # tokens of no sequence
        out[covered:] = 0
        lse[:, covered:] = -torch.inf
    return out, lse


def forward_launch(plan: Plan, call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Launch:
    target = targets.host()
    variant = args.variant_of(call, target, plan.tile.rows)
    variant = variant._replace(few=args.few(call, variant, target, plan.tile.rows))
    values = args.numbers(call, variant, q, k, v)
    rows = variant.vectors * target.vector_bytes // lse.element_size()
    panels = -(-plan.tile.rows // rows)
    lengths = args.lengths(call, values["num_heads_kv"], values["groups"], panels * rows)
    splits = call.settings.num_splits or plan.num_splits
    pieces = workspace.forward_pieces(variant.real, rows, panels, q.shape[-1], v.shape[-1])
    values |= {
        **args.strides("out", out),
        **args.lse_strides(lse),
        "sequences": lengths.table.ctypes.data,
        "tasks": lengths.tasks * splits,
        "batch": lengths.batch,
        "panels": panels,
        "splits": splits,
        "chunk": args.chunk(lengths.longest, splits),
        "work_size": workspace.size(pieces),
    }
    function = forward_address(variant, target)
    most = args.most_threads(call, lengths, min(plan.tile.rows, panels * rows))
    results = (args.Layout.of(out), args.Layout.of(lse))
    return Launch(
        threads.WORKER(function),
        args.block_of(values),
        min(values["tasks"], most),
        values["work_size"],
        lengths,
        splits,
        results,
    )


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    if call.layout == "paged":
        packed, token = without_pages(call)
        found = backward(plan, packed, needs, out, lse, dout, dlse)
        dk, dv = (in_pages(dx, token, x) for dx, x in ((found.k, call.tensors.k), (found.v, call.tensors.v)))
        return found._replace(k=dk, v=dv)
    t = call.tensors
    q, k, v, out = (rows_last(x) for x in (t.q, t.k, t.v, out))
    real = accumulation_dtype(q.dtype)
    dout = out.new_zeros(out.shape[-1]).expand(out.shape) if dout is None else rows_last(dout.to(out.dtype))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.to(real).contiguous()
    target = targets.host()
    variant = args.variant_of(call, target, plan.tile.rows)
    variant = variant._replace(bias_gradient=needs.bias, slope_gradient=needs.alibi_slopes)
    values = args.numbers(call, variant, q, k, v)
    lanes = target.vector_bytes // real.itemsize
    rows = variant.vectors * lanes
    lengths = args.lengths(call, values["num_heads_kv"], values["groups"], rows)
    owners = args.owners(call, needs, lengths)
    splits = owners.splits
    delta = torch.zeros_like(lse)
    dslopes = lse.new_zeros((splits, *lse.shape)) if needs.alibi_slopes else None
    dbias = t.bias.new_zeros(t.bias.shape, dtype=real) if needs.bias and t.bias is not None else None
    dq = new_rows(q, q.shape[1], q.shape[-1], real) if needs.q else None
    parts = None if dq is None else dq[None] if splits == 1 else dq.new_empty((splits, *dq.shape))
    dk, dv = (
        new_rows(x, values["num_heads_kv"], workspace.whole(x.shape[-1], lanes), real).zero_() if needed else None
        for x, needed in ((k, needs.k), (v, needs.v))
    )
    given = {"out": out, "dout": dout, "lse": lse, "dlse": dlse, "delta": delta, "dslopes": dslopes, "dbias": dbias}
    results = {"dq": parts, "dk": dk, "dv": dv}
    places, alive = args.addresses(call, q, k, v)
    places |= {name: x.data_ptr() for name, x in (given | results).items() if x is not None}
    for name, x in {"out": out, "dout": dout, "dk": dk, "dv": dv, "dq": None if parts is None else parts[0]}.items():
        values |= {} if x is None else args.strides(name, x)
    if parts is not None:
        values["dq_split"] = parts.stride(0)
    if dbias is not None:
        values |= args.pair_strides("dbias", dbias)
    pieces = workspace.backward_pieces(variant.real, rows, lanes, q.shape[-1], v.shape[-1])
    values |= {
        **args.lse_strides(lse),
        "sequences": lengths.table.ctypes.data,
        "tasks": owners.tasks,
        "batch": lengths.batch,
        "panels": 1,
        "splits": splits,
        "chunk": args.chunk(lengths.longest, splits),
        "share_b": owners.share_b,
        "share_h": owners.share_h,
        "work_size": workspace.size(pieces),
    }
    function = backward_address(variant, target)
    most = args.most_threads(call, lengths, rows)
    most = min(owners.tasks, most)
    run(Launch(threads.WORKER(function), args.block_of(values), most, values["work_size"], lengths), places)
    del alive
    if dq is not None and parts is not None:
        if splits > 1:
            torch.sum(parts, 0, out=dq)
        if dq.dim() == 3:
            dq[lengths.covered :] = 0
    return Gradients(
        q=dq,
        k=without_padding(k, dk),
        v=without_padding(v, dv),
        bias=dbias,
        alibi_slopes=None if dslopes is None else slope_gradient(call, dslopes.sum(dim=0), lengths),
        sinks=sink_gradient(call, lse, delta) if needs.sinks else None,
    )


def without_padding(like: Tensor, dx: Tensor | None) -> Tensor | None:
    """A gradient whose rows are whole vectors, as wide as its input."""
    if dx is None or dx.shape[-1] == like.shape[-1]:
        return dx
    return new_rows(like, like.shape[1], like.shape[-1], dx.dtype).copy_(dx[..., : like.shape[-1]])


def sink_gradient(call: Call, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key without a value: `ds = p * (0 - delta)`, summed over rows."""
    assert call.tensors.sinks is not None
    sinks = call.tensors.sinks.to(lse.dtype)[:, None]  # [H, 1]
    p = torch.where(lse == -torch.inf, 0, torch.exp(sinks - lse))  # [B, H, S] or [H, T]
    return -(p * delta).sum(dim=-1).reshape(-1, sinks.shape[0]).sum(dim=0)


def slope_gradient(call: Call, of_rows: Tensor, lengths: args.Lengths) -> Tensor:
    """What rows add to their slopes, `[B, H, S]` or packed `[H, T]`, as `[H]` or `[B, H]`."""
    slopes, bounds = call.tensors.alibi_slopes, call.tensors.cu_seqlens_q
    assert slopes is not None
    if bounds is None:
        of_rows = of_rows.sum(dim=-1)
    else:
        sequence = torch.repeat_interleave(torch.arange(lengths.batch), bounds.diff().long())  # [T]
        found = of_rows.new_zeros((lengths.batch, of_rows.shape[0]))
        of_rows = found.index_add_(0, sequence, of_rows[:, : lengths.covered].t().contiguous())
    return of_rows if slopes.dim() == 2 else of_rows.sum(dim=0)


def without_pages(call: Call) -> tuple[Call, Tensor]:
    """A paged call with its keys packed, and the place in the pages of each packed token."""
    t = call.tensors
    assert t.page_table is not None
    assert t.seqused_k is not None or t.cu_seqlens_k is not None
    page_size = t.k.shape[1]
    used = t.seqused_k if t.seqused_k is not None else t.cu_seqlens_k.diff()  # type: ignore[union-attr]
    bounds = torch.nn.functional.pad(used.long().cumsum(0), (1, 0))  # [B + 1]
    sequence = torch.repeat_interleave(torch.arange(len(used)), used.long())  # [T]
    position = torch.arange(int(bounds[-1])) - bounds[sequence]
    token = t.page_table.long()[sequence, position // page_size] * page_size + position % page_size
    k, v = (x.flatten(0, 1)[token] for x in (t.k, t.v))  # [T, Hkv, D]
    return call._replace(tensors=t._replace(k=k, v=v, cu_seqlens_k=bounds, seqused_k=None, page_table=None)), token


def in_pages(dx: Tensor | None, token: Tensor, like: Tensor) -> Tensor | None:
    """A gradient of packed keys as one of pages; sequences may share a page."""
    if dx is None:
        return None
    pages = dx.new_zeros((like.shape[0] * like.shape[1], *dx.shape[1:]))
    return pages.index_add_(0, token, dx).unflatten(0, like.shape[:2])


def combine(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Splits `[splits, ..., Dv]` and `[splits, ...]` to their union: means, weighted by `exp(lse)`. To be the largest
    is a weight of 1 also where that is infinite.
    """
    m = partial_lse.amax(dim=0)
    weights = torch.where(partial_lse == m, 1, torch.exp(partial_lse - m))
    total = weights.sum(dim=0)
    out.copy_((partial_out * weights[..., None]).sum(dim=0) / total[..., None])
    lse.copy_(m + torch.log(total))


def run(launch: Launch, places: dict[str, int]) -> None:
    count = min(torch.get_num_threads(), launch.most_threads)
    if count == 0:
        return
    memory = torch.empty(count * launch.work_size, dtype=torch.uint8, device="cpu")
    places["workspace"] = memory.data_ptr()
    block = args.filled(launch.block, places)
    threads.run(launch.function, ctypes.addressof(block), count)
