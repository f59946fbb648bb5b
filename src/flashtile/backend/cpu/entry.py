"""The CPU backend's entries: results are allocated, arguments packed, a kernel is run on PyTorch's threads.

The generators are imported when a kernel has to be compiled.
"""

import ctypes
import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, lse_shape, new_rows
from ...call.plan import Plan
from ...call.problem import accumulation_dtype
from ...remember import remember
from ..epilogue import sink_gradient
from ..scalars import rows_last
from . import arguments as args
from . import targets, threads, workspace
from .epilogue import gather_pages, scatter_to_pages, slope_gradient, without_padding
from .jit import function_address
from .kernels import sums
from .targets import Target
from .variant import BACKWARD, FORWARD, Variant

MAX_LAUNCHES = 1024


@functools.lru_cache(maxsize=1024)
def forward_address(variant: Variant, target: Target) -> int:
    def source() -> str:
        from .kernels import decode, forward

        return forward.source(variant, target, decode.DecodeKernel if variant.decode else forward.ForwardKernel)

    return function_address(FORWARD, variant, target, source)


@functools.lru_cache(maxsize=1024)
def backward_address(variant: Variant, target: Target) -> int:
    def source() -> str:
        from .kernels import backward

        return backward.source(variant, target)

    return function_address(BACKWARD, variant, target, source)


class KernelLaunch(NamedTuple):
    """A kernel and all that it is told, short of addresses."""

    function: Any
    block: Any
    max_threads: int
    work_size: int
    lengths: args.Lengths
    splits: int = 1
    results: tuple[args.TensorSpec, ...] = ()


_LAUNCHES: dict[Hashable, KernelLaunch] = {}


def vector_lanes(call: Call) -> int:
    """Reals in a vector."""
    return targets.host().vector_bytes // accumulation_dtype(call.tensors.q.dtype).itemsize


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    t = call.tensors
    q, k, v = rows_last(t.q), rows_last(t.k), rows_last(t.v)
    # Dense calls of one signature are told the same; packed ones follow from the values of their lengths.
    key = (plan.tile, plan.num_splits, targets.requested_width(), call.signature()) if call.layout == "dense" else None
    launch = _LAUNCHES.get(key)
    if launch is None:
        out = new_rows(t.q, q.shape[1], v.shape[-1], q.dtype)
        lse = q.new_empty(lse_shape(q), dtype=accumulation_dtype(q.dtype))
        launch = forward_launch(plan, call, q, k, v, out, lse)
        if key is not None:
            remember(_LAUNCHES, key, launch, MAX_LAUNCHES)
    else:
        out, lse = (spec.new() for spec in launch.results)
    tensors = args.input_tensors(call, q, k, v) | {"out": out, "lse": lse}
    if launch.splits > 1:
        shape = (launch.splits, *lse.shape)
        partial_out, partial_lse = lse.new_empty((*shape, v.shape[-1])), lse.new_empty(shape)
        run(launch, tensors | {"partial_out": partial_out, "partial_lse": partial_lse})
        combine(partial_out, partial_lse, out if out.dim() == 4 else out.transpose(0, 1), lse)
    else:
        run(launch, tensors)
    used_tokens = launch.lengths.used_tokens
    if q.dim() == 3 and used_tokens < q.shape[0]:  # tokens of no sequence
        out[used_tokens:] = 0
        lse[:, used_tokens:] = -torch.inf
    return out, lse


def forward_launch(plan: Plan, call: Call, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> KernelLaunch:
    target = targets.host()
    variant = args.variant_of(call, target, plan.tile.rows)
    variant = variant._replace(decode=args.fits_decode(call, variant, target, plan.tile.rows))
    values = args.call_scalars(call, variant, q, k, v)
    rows = variant.vectors * vector_lanes(call)
    panels = -(-plan.tile.rows // rows)
    lengths = args.lengths(call, values["num_heads_kv"], values["groups"], panels * rows)
    splits = call.settings.num_splits or plan.num_splits
    widths = q.shape[-1], v.shape[-1]
    values |= {
        **args.strides("out", out),
        **args.lse_strides(lse),
        "sequences": lengths.table.ctypes.data,
        "tasks": lengths.tasks * splits,
        "batch": lengths.batch,
        "panels": panels,
        "splits": splits,
        "chunk": args.chunk(lengths.max_seqlen_k, splits),
        "work_size": workspace.num_bytes(workspace.forward_layout, variant.real_type, rows, panels, *widths),
    }
    function = forward_address(variant, target)
    max_threads = args.max_threads(call, lengths, min(plan.tile.rows, panels * rows))
    results = (args.TensorSpec.of(out), args.TensorSpec.of(lse))
    return KernelLaunch(
        threads.WORKER(function),
        args.pack(values),
        min(values["tasks"], max_threads),
        values["work_size"],
        lengths,
        splits,
        results,
    )


class GradientBuffers(NamedTuple):
    """What a backward kernel writes; `None` for a gradient that nobody asked for."""

    delta: Tensor
    dq: Tensor | None  # for each split of the keys
    dk: Tensor | None  # in rows of whole vectors
    dv: Tensor | None
    dbias: Tensor | None
    dbias_error: Tensor | None  # rounding errors of many terms
    dslopes: Tensor | None  # for each split and row


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    if call.layout == "paged":
        packed, token = gather_pages(call)
        grads = backward(plan, packed, needs, out, lse, dout, dlse)
        dk, dv = (scatter_to_pages(dx, token, x) for dx, x in ((grads.k, call.tensors.k), (grads.v, call.tensors.v)))
        return grads._replace(k=dk, v=dv)
    t = call.tensors
    q, k, v, out = (rows_last(x) for x in (t.q, t.k, t.v, out))
    dout = out.new_zeros(out.shape[-1]).expand(out.shape) if dout is None else rows_last(dout.to(out.dtype))
    lse, dlse = lse.contiguous(), None if dlse is None else dlse.to(lse.dtype).contiguous()
    key = None
    if call.layout == "dense":  # as in forward
        key = (plan.tile, needs, targets.requested_width(), call.signature(), out.stride(), dout.stride())
    launch = _LAUNCHES.get(key)
    if launch is None:
        variant, lengths, task_split = plan_backward(plan, call, needs)
        buffers = allocate_gradients(call, needs, lse, lengths, task_split.splits)
        launch = backward_launch(call, variant, lengths, task_split, (q, k, v, out, dout), lse, buffers)
        if key is not None:
            remember(_LAUNCHES, key, launch, MAX_LAUNCHES)
    else:
        buffers = allocate_gradients(call, needs, lse, launch.lengths, launch.splits)
    row_tensors = {"out": out, "dout": dout, "lse": lse, "dlse": dlse, **buffers._asdict()}
    run(launch, args.input_tensors(call, q, k, v) | {name: x for name, x in row_tensors.items() if x is not None})
    dq, dslopes = buffers.dq, buffers.dslopes
    if dq is not None:
        dq = dq[0] if launch.splits == 1 else torch.sum(dq, 0, out=new_rows(t.q, q.shape[1], q.shape[-1], dq.dtype))
        if dq.dim() == 3:
            dq[launch.lengths.used_tokens :] = 0
    return Gradients(
        q=dq,
        k=without_padding(t.k, buffers.dk),
        v=without_padding(t.v, buffers.dv),
        bias=buffers.dbias,
        alibi_slopes=None if dslopes is None else slope_gradient(call, dslopes.sum(dim=0), launch.lengths),
        sinks=sink_gradient(t.sinks, lse, buffers.delta) if needs.sinks and t.sinks is not None else None,
    )


def plan_backward(plan: Plan, call: Call, needs: Needs) -> tuple[Variant, args.Lengths, args.TaskSplit]:
    """What is compiled in, and how the work is shared out."""
    variant = args.variant_of(call, targets.host(), plan.tile.rows)
    variant = variant._replace(bias_gradient=needs.bias, slope_gradient=needs.alibi_slopes)
    heads_kv = args.heads_kv(call)
    lengths = args.lengths(call, heads_kv, call.tensors.q.shape[1] // heads_kv, variant.vectors * vector_lanes(call))
    return variant, lengths, args.split_tasks(call, needs, lengths)


def allocate_gradients(call: Call, needs: Needs, lse: Tensor, lengths: args.Lengths, splits: int) -> GradientBuffers:
    """Uninitialised as far as the kernel stores all of it. Packed keys and queries may belong to no sequence."""
    t, real = call.tensors, lse.dtype
    bias = t.bias if needs.bias else None
    compensated = bias is not None and args.pairs_per_bias_element(call, bias, lengths) > sums.MAX_PLAIN_TERMS
    dk, dv = (
        new_rows(x, args.heads_kv(call), workspace.round_up(x.shape[-1], vector_lanes(call)), real) if needed else None
        for x, needed in ((t.k, needs.k), (t.v, needs.v))
    )
    if call.layout != "dense":
        for x in (dk, dv):
            if x is not None:
                x.zero_()
    return GradientBuffers(
        delta=torch.zeros_like(lse),
        dq=allocate_dq(t.q, real, splits) if needs.q else None,
        dk=dk,
        dv=dv,
        dbias=None if bias is None else bias.new_zeros(bias.shape, dtype=real),
        dbias_error=bias.new_zeros(bias.shape, dtype=real) if bias is not None and compensated else None,
        dslopes=lse.new_zeros((splits, *lse.shape)) if needs.alibi_slopes else None,
    )


def allocate_dq(q: Tensor, real: torch.dtype, splits: int) -> Tensor:
    """`dq` itself, if there is one split."""
    if splits == 1:
        return new_rows(q, q.shape[1], q.shape[-1], real)[None]
    return q.new_empty((splits, *q.shape), dtype=real)


def backward_launch(
    call: Call,
    variant: Variant,
    lengths: args.Lengths,
    task_split: args.TaskSplit,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    buffers: GradientBuffers,
) -> KernelLaunch:
    q, k, v, out, dout = inputs
    values = args.call_scalars(call, variant, q, k, v)
    dq, dbias = buffers.dq, buffers.dbias
    of_rows = {"out": out, "dout": dout, "dk": buffers.dk, "dv": buffers.dv, "dq": None if dq is None else dq[0]}
    for name, x in of_rows.items():
        values |= {} if x is None else args.strides(name, x)
    rows, widths = variant.vectors * vector_lanes(call), (q.shape[-1], v.shape[-1])
    chunk = args.chunk(lengths.max_seqlen_k, task_split.splits)
    total_keys = min(chunk, lengths.max_seqlen_k) if lengths.max_rows > sums.ROWS_PER_CARRY else 0
    values |= {
        **args.lse_strides(lse),
        **({} if dbias is None else args.pair_strides("dbias", dbias)),
        "dq_split": 0 if dq is None else dq.stride(0),
        "sequences": lengths.table.ctypes.data,
        "tasks": task_split.tasks,
        "batch": lengths.batch,
        "panels": 1,
        "splits": task_split.splits,
        "chunk": chunk,
        "total_keys": total_keys,
        "share_b": task_split.share_b,
        "share_h": task_split.share_h,
        "work_size": workspace.num_bytes(
            workspace.backward_layout, variant.real_type, rows, vector_lanes(call), *widths, total_keys
        ),
    }
    worker = threads.WORKER(backward_address(variant, targets.host()))
    max_threads = min(task_split.tasks, args.max_threads(call, lengths, rows))
    return KernelLaunch(worker, args.pack(values), max_threads, values["work_size"], lengths, task_split.splits)


def combine(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Splits `[splits, ..., Dv]` and `[splits, ...]` to their union: means, weighted by `exp(lse)`. To be the largest
    is a weight of 1 also where that is infinite.
    """
    m = partial_lse.amax(dim=0)
    weights = torch.where(partial_lse == m, 1, torch.exp(partial_lse - m))
    total = weights.sum(dim=0)
    out.copy_((partial_out * weights[..., None]).sum(dim=0) / total[..., None])
    lse.copy_(m + torch.log(total))


def run(launch: KernelLaunch, tensors: dict[str, Tensor]) -> None:
    """Run a kernel. It knows addresses alone: what lies there needs a name in use until afterwards. Dynamo, which may
    find itself in this function after a graph break, lets go of names that nothing mentions any more.
    """
    count = min(torch.get_num_threads(), launch.max_threads)
    if count == 0:
        return
    tensors = tensors | {"workspace": torch.empty(count * launch.work_size, dtype=torch.uint8, device="cpu")}
    block = args.bind(launch.block, tensors)
    threads.run(launch.function, ctypes.addressof(block), count)
    del tensors, block
