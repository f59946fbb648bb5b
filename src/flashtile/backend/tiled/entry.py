"""The tiled backend's entries, which the dispatcher calls: convert shapes and dtypes for the blockwise loops."""

from torch import Tensor

from ...call.call import Call, Gradients, Needs, Tangents
from ...call.eight_bit_layouts import dequantized
from ...call.plan import Plan
from ...call.problem import accumulation_dtype
from ..blockwise.lse_shape import lse_to_rows, row_stats_to_rows, rows_to_lse, rows_to_row_stats
from . import backward as backward_pass
from . import forward as forward_pass
from . import tangents as forward_mode
from .backward import Saved


def forward(plan: Plan, call: Call) -> tuple[Tensor, Tensor]:
    call = dequantized(call)
    out, *row_stats = forward_pass.forward(call, plan.tile, accumulation_dtype(call.tensors.q.dtype))
    return out, rows_to_row_stats(call, *row_stats)


def tangents(plan: Plan, call: Call, tangents: Tangents) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = accumulation_dtype(call.tensors.q.dtype)
    out, lse, residual, dout, dlse = forward_mode.forward(call, tangents, plan.tile, dtype)
    return out, rows_to_row_stats(call, lse, residual), dout, rows_to_lse(call, dlse)


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    dtype = accumulation_dtype(call.tensors.q.dtype)
    dlse_rows = None if dlse is None else lse_to_rows(call, dlse)
    saved = Saved(out, *row_stats_to_rows(call, lse), dout, dlse_rows)
    return backward_pass.backward(call, needs, plan.tile, dtype, saved)
