"""Host code of forward mode: allocate results and their tangents, launch the kernel."""

from torch import Tensor

from ...call.call import Call, Tangents, new_rows, row_stats_shape, split_row_stats
from ...call.plan import Plan
from ...call.problem import accumulation_dtype
from ..scalars import rows_last
from . import arguments as args
from . import targets, workspace
from .blocks import table_tensors
from .host_forward import fill_unused, launch_over_rows, with_lengths
from .launch import run
from .machine_code import CpuKernel
from .variant import TANGENTS


def tangents(plan: Plan, call: Call, of_inputs: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`out`, `lse` and the tangents of both, along tangents of the inputs: `None` for an input without one."""
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    out, dout = (new_rows(call.tensors.q, q.shape[1], v.shape[-1], q.dtype) for _ in range(2))
    lse = q.new_empty(row_stats_shape(call), dtype=accumulation_dtype(q.dtype))
    dlse = lse.new_empty(split_row_stats(q, lse)[0].shape)
    target = targets.host()
    variant = args.with_tangents(args.variant_of(call, target, plan.tile.rows), call, of_inputs)
    kernel = CpuKernel(TANGENTS, variant._replace(row_values=args.whole_vectors(call, v)), target)
    launch = launch_over_rows(kernel, workspace.tangent_layout, plan.tile.rows, call, (q, k, v), (out, lse))
    moving = args.tangent_tensors(call, of_inputs)
    block = args.with_fields(launch.block, args.tangent_strides(call, moving))
    launch = with_lengths(launch._replace(block=block), call)
    captured = args.captured_tensors(call)
    captured += args.stored([x for x in of_inputs.score_mod_tensors if x is not None])
    tensors = args.input_tensors(call, q, k, v) | moving | {"out": out, "lse": lse, "dout": dout, "dlse": dlse}
    tensors |= args.captured_table(captured) | table_tensors(launch.blocks, call)
    run(launch, tensors)
    del captured
    fill_unused(launch, q, out, lse)
    for tokens in launch.lengths.unused:
        dout[tokens] = 0
        dlse[:, tokens] = 0
    return out, lse, dout, dlse
