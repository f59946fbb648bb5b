"""Host code of second derivatives: a forward pass with tangents, then one kernel for all gradients."""

from torch import Tensor

from ...call.call import Call, Gradients, Needs, Tangents, split_row_stats
from ...call.plan import Plan
from ..epilogue import second_sink_gradient
from ..scalars import rows_last
from . import arguments as args
from . import workspace
from .blocks import table_tensors
from .epilogue import without_padding
from .host_backward import allocate_gradients, backward_launch, backward_tasks, query_gradient, row_tensors
from .host_tangents import tangents
from .launch import run
from .variant import SECOND


def second(
    plan: Plan, call: Call, along: Tangents, needs: Needs, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Gradients]:
    """The tangents of `out` and `lse` along directions of q, k and v, and the gradients of their products with `dout`
    and `dlse`, in the accumulation dtype.
    """
    out, lse, tout, tlse = tangents(plan, call, along)
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    rows, tasks = row_tensors(out, lse, dout, dlse), backward_tasks(plan, call, needs)
    tasks = tasks._replace(variant=args.with_tangents(tasks.variant, call, along))
    of_rows = split_row_stats(q, rows.lse)[0]
    buffers = allocate_gradients(call, needs, of_rows, tasks.lengths, tasks.split.splits)
    inputs = (q, k, v, rows.out, rows.dout)
    launch = backward_launch(call, tasks, inputs, rows.lse, buffers, SECOND, workspace.second_layout)
    given = {f"t{name}": rows_last(x) for name, x in zip("qkv", along, strict=False) if x is not None}
    strides = [args.strides(name, x) for name, x in given.items()]
    block = args.with_fields(launch.block, {name: x for values in strides for name, x in values.items()})
    given |= {"tlse": tlse, "product": row_products(rows.dout, tout, of_rows)}
    captured = args.captured_tensors(call)  # a mask function's; the kernel reads them
    tensors = args.input_tensors(call, q, k, v) | given | table_tensors(launch.blocks, call)
    tensors |= args.captured_table(captured)
    for fields in (rows, buffers):
        tensors.update([(name, x) for name, x in zip(fields._fields, fields, strict=True) if x is not None])
    run(launch._replace(block=block), tensors)
    del captured
    dq = query_gradient(launch, call, buffers.dq)
    dk, dv = (without_padding(x, dx) for x, dx in ((call.tensors.k, buffers.dk), (call.tensors.v, buffers.dv)))
    dsinks = None
    if needs.sinks and call.tensors.sinks is not None:
        residual = split_row_stats(q, rows.lse)[1]
        dsinks = second_sink_gradient(
            call.tensors.sinks, along.sinks, of_rows, residual, buffers.delta, tlse, given["product"]
        )
    return (
        tout,
        tlse,
        Gradients(q=dq, k=dk, v=dv, sinks=dsinks, score_mod_tensors=(None,) * len(call.tensors.score_mod_tensors)),
    )


def row_products(dout: Tensor, tout: Tensor, like: Tensor) -> Tensor:
    """`<dout, tout>` of each row, shaped as lse: `[B, H, S]`, or `[H, T]` of packed rows."""
    products = (dout.to(like.dtype) * tout.to(like.dtype)).sum(dim=-1)
    return (products if products.dim() == 3 else products.t()).contiguous()
