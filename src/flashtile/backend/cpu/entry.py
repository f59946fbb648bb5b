"""The CPU backend's entries: results are allocated, arguments packed, a kernel is run on PyTorch's threads.

The generators are imported when a kernel has to be compiled.
"""

import ctypes
import functools
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, lse_shape, new_rows
from ...call.plan import Plan
from ...call.problem import accumulation_dtype
from ..epilogue import sink_gradient
from ..scalars import rows_last
from . import arguments as args
from . import targets, threads, workspace
from .epilogue import in_pages, slope_gradient, without_padding, without_pages
from .jit import function_address
from .kernels import sums
from .targets import Target
from .variant import BACKWARD, FORWARD, Variant


@functools.lru_cache(maxsize=1024)
def forward_address(variant: Variant, target: Target) -> int:
    def source() -> str:
        from .kernels import decode, forward

        return forward.source(variant, target, decode.Decode if variant.few else forward.Forward)

    return function_address(FORWARD, variant, target, source)


@functools.lru_cache(maxsize=1024)
def backward_address(variant: Variant, target: Target) -> int:
    def source() -> str:
        from .kernels import backward

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


def lanes(call: Call) -> int:
    """Reals in a vector."""
    return targets.host().vector_bytes // accumulation_dtype(call.tensors.q.dtype).itemsize


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    return record_forward(plan, call)[1]


def record_forward(plan: Plan, call: Call) -> tuple[Any, tuple[Tensor, Tensor]]:
    """As `forward`, and the function that repeats it for calls of the same layout; `None` for packed calls, which
    depend on the values of their lengths.
    """
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    out = new_rows(call.tensors.q, q.shape[1], v.shape[-1], q.dtype)
    lse = q.new_empty(lse_shape(q), dtype=accumulation_dtype(q.dtype))
    launch = forward_launch(plan, call, q, k, v, out, lse)
    results = run_forward(launch, call, (q, k, v), out, lse)
    return partial(replay_forward, launch) if call.layout == "dense" else None, results


def replay_forward(launch: Launch, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = (layout.new() for layout in launch.results)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    return run_forward(launch, call, (q, k, v), out, lse)


def run_forward(launch: Launch, call: Call, qkv: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    tensors = args.read(call, q, k, v) | {"out": out, "lse": lse}
    if launch.splits > 1:
        shape = (launch.splits, *lse.shape)
        partial_out, partial_lse = lse.new_empty((*shape, v.shape[-1])), lse.new_empty(shape)
        run(launch, tensors | {"partial_out": partial_out, "partial_lse": partial_lse})
        combine(partial_out, partial_lse, out if out.dim() == 4 else out.transpose(0, 1), lse)
    else:
        run(launch, tensors)
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
    rows = variant.vectors * lanes(call)
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
        "chunk": args.chunk(lengths.longest, splits),
        "work_size": workspace.size(workspace.forward_pieces, variant.real, rows, panels, *widths),
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


class Written(NamedTuple):
    """What a backward kernel writes; `None` for a gradient that nobody asked for."""

    delta: Tensor
    dq: Tensor | None  # for each split of the keys
    dk: Tensor | None  # in rows of whole vectors
    dv: Tensor | None
    dbias: Tensor | None
    dbias_lost: Tensor | None  # rounding errors of many terms
    dslopes: Tensor | None  # for each split and row


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    return record_backward(plan, call, needs, out, lse, dout, dlse)[1]


def record_backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, Gradients]:
    """As `backward`, and the function that repeats it for calls of the same layout, as `record_forward`."""
    if call.layout == "paged":
        packed, token = without_pages(call)
        found = backward(plan, packed, needs, out, lse, dout, dlse)
        dk, dv = (in_pages(dx, token, x) for dx, x in ((found.k, call.tensors.k), (found.v, call.tensors.v)))
        return None, found._replace(k=dk, v=dv)
    rows = rows_of(out, lse, dout, dlse)
    variant, lengths, owners = backward_tasks(plan, call, needs)
    written = gradient_memory(call, needs, rows.lse, lengths, owners.splits)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    launch = backward_launch(call, variant, lengths, owners, (q, k, v, rows.out, rows.dout), rows.lse, written)
    gradients = run_backward(launch, call, (q, k, v), needs, rows, written)
    return partial(replay_backward, launch, needs) if call.layout == "dense" else None, gradients


def replay_backward(
    launch: Launch, needs: Needs, call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    rows = rows_of(out, lse, dout, dlse)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    written = gradient_memory(call, needs, rows.lse, launch.lengths, launch.splits)
    return run_backward(launch, call, (q, k, v), needs, rows, written)


class Rows(NamedTuple):
    """The rows of out and lse with their gradients, as the kernel reads them."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def rows_of(out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> Rows:
    out = rows_last(out)
    dout = out.new_zeros(out.shape[-1]).expand(out.shape) if dout is None else rows_last(dout.to(out.dtype))
    return Rows(out, lse.contiguous(), dout, None if dlse is None else dlse.to(lse.dtype).contiguous())


def run_backward(
    launch: Launch, call: Call, qkv: tuple[Tensor, ...], needs: Needs, rows: Rows, written: Written
) -> Gradients:
    t, (q, k, v) = call.tensors, qkv
    named = {**rows._asdict(), **written._asdict()}
    run(launch, args.read(call, q, k, v) | {name: x for name, x in named.items() if x is not None})
    dq, dslopes = written.dq, written.dslopes
    if dq is not None:
        dq = dq[0] if launch.splits == 1 else torch.sum(dq, 0, out=new_rows(t.q, q.shape[1], q.shape[-1], dq.dtype))
        if dq.dim() == 3:
            dq[launch.lengths.covered :] = 0
    return Gradients(
        q=dq,
        k=without_padding(t.k, written.dk),
        v=without_padding(t.v, written.dv),
        bias=written.dbias,
        alibi_slopes=None if dslopes is None else slope_gradient(call, dslopes.sum(dim=0), launch.lengths),
        sinks=sink_gradient(t.sinks, rows.lse, written.delta) if needs.sinks and t.sinks is not None else None,
    )


def backward_tasks(plan: Plan, call: Call, needs: Needs) -> tuple[Variant, args.Lengths, args.Owners]:
    """What is compiled in, and how the work is shared out."""
    variant = args.variant_of(call, targets.host(), plan.tile.rows)
    variant = variant._replace(bias_gradient=needs.bias, slope_gradient=needs.alibi_slopes)
    heads_kv = args.heads_kv(call)
    lengths = args.lengths(call, heads_kv, call.tensors.q.shape[1] // heads_kv, variant.vectors * lanes(call))
    return variant, lengths, args.owners(call, needs, lengths)


def gradient_memory(call: Call, needs: Needs, lse: Tensor, lengths: args.Lengths, splits: int) -> Written:
    """Uninitialised as far as the kernel stores all of it. Packed keys and queries may belong to no sequence."""
    t, real = call.tensors, lse.dtype
    bias = t.bias if needs.bias else None
    many = bias is not None and args.sharing_bias(call, bias, lengths) > sums.TERMS
    dk, dv = (
        new_rows(x, args.heads_kv(call), workspace.whole(x.shape[-1], lanes(call)), real) if needed else None
        for x, needed in ((t.k, needs.k), (t.v, needs.v))
    )
    if call.layout != "dense":
        for x in (dk, dv):
            if x is not None:
                x.zero_()
    return Written(
        delta=torch.zeros_like(lse),
        dq=parts_of_dq(t.q, real, splits) if needs.q else None,
        dk=dk,
        dv=dv,
        dbias=None if bias is None else bias.new_zeros(bias.shape, dtype=real),
        dbias_lost=bias.new_zeros(bias.shape, dtype=real) if bias is not None and many else None,
        dslopes=lse.new_zeros((splits, *lse.shape)) if needs.alibi_slopes else None,
    )


def parts_of_dq(q: Tensor, real: torch.dtype, splits: int) -> Tensor:
    """`dq` itself, if there is one split."""
    if splits == 1:
        return new_rows(q, q.shape[1], q.shape[-1], real)[None]
    return q.new_empty((splits, *q.shape), dtype=real)


def backward_launch(
    call: Call,
    variant: Variant,
    lengths: args.Lengths,
    owners: args.Owners,
    read: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    lse: Tensor,
    written: Written,
) -> Launch:
    q, k, v, out, dout = read
    values = args.numbers(call, variant, q, k, v)
    dq, dbias = written.dq, written.dbias
    of_rows = {"out": out, "dout": dout, "dk": written.dk, "dv": written.dv, "dq": None if dq is None else dq[0]}
    for name, x in of_rows.items():
        values |= {} if x is None else args.strides(name, x)
    rows, widths = variant.vectors * lanes(call), (q.shape[-1], v.shape[-1])
    chunk = args.chunk(lengths.longest, owners.splits)
    total_keys = min(chunk, lengths.longest) if lengths.most_rows > sums.ROWS else 0
    values |= {
        **args.lse_strides(lse),
        **({} if dbias is None else args.pair_strides("dbias", dbias)),
        "dq_split": 0 if dq is None else dq.stride(0),
        "sequences": lengths.table.ctypes.data,
        "tasks": owners.tasks,
        "batch": lengths.batch,
        "panels": 1,
        "splits": owners.splits,
        "chunk": chunk,
        "total_keys": total_keys,
        "share_b": owners.share_b,
        "share_h": owners.share_h,
        "work_size": workspace.size(workspace.backward_pieces, variant.real, rows, lanes(call), *widths, total_keys),
    }
    worker = threads.WORKER(backward_address(variant, targets.host()))
    most = min(owners.tasks, args.most_threads(call, lengths, rows))
    return Launch(worker, args.block_of(values), most, values["work_size"], lengths, owners.splits)


def combine(partial_out: Tensor, partial_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Splits `[splits, ..., Dv]` and `[splits, ...]` to their union: means, weighted by `exp(lse)`. To be the largest
    is a weight of 1 also where that is infinite.
    """
    m = partial_lse.amax(dim=0)
    weights = torch.where(partial_lse == m, 1, torch.exp(partial_lse - m))
    total = weights.sum(dim=0)
    out.copy_((partial_out * weights[..., None]).sum(dim=0) / total[..., None])
    lse.copy_(m + torch.log(total))


def run(launch: Launch, tensors: dict[str, Tensor]) -> None:
    """Run a kernel. It knows addresses alone: what lies there needs a name in use until afterwards. Dynamo, which may
    find itself in this function after a graph break, lets go of names that nothing mentions any more.
    """
    count = min(torch.get_num_threads(), launch.most_threads)
    if count == 0:
        return
    tensors = tensors | {"workspace": torch.empty(count * launch.work_size, dtype=torch.uint8, device="cpu")}
    block = args.filled(launch.block, tensors)
    threads.run(launch.function, ctypes.addressof(block), count)
    del tensors, block
