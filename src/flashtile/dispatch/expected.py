"""The kernels of a training step's backward pass, which are compiled at the same time as forward's."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

from ..call.call import Call, Needs, differentiable_positions, new_rows, row_stats_shape
from ..call.plan import Plan
from ..call.problem import accumulation_dtype
from ..errors import AttentionError
from .passes import function_of
from .planner import plan_call


def backward_kernels(call: Call) -> Iterable[Any]:
    """The kernels that the backward pass of a call will need, if autograd records the call. None where the pass is an
    error, which the pass itself raises.
    """
    if call.is_differentiated:
        with contextlib.suppress(AttentionError):
            flat = call.tensors.flat()
            places = [flat[n] for n in differentiable_positions(len(flat))]
            needs = Needs.from_flat([x is not None and x.requires_grad for x in places])
            chosen = plan_call(call, needs=needs)
            if chosen.backend == "cpu":
                return cpu_kernels(chosen, call, needs)
    return ()


def cpu_kernels(chosen: Plan, call: Call, needs: Needs) -> Iterable[Any]:
    """Those of a CPU: the pass runs, and launches nothing."""
    from ..backend.cpu.machine_code import collected_kernels

    q, v = call.tensors.q, call.tensors.v
    out = new_rows(q, q.shape[1], v.shape[-1], call.out_dtype)
    row_stats = q.new_empty(row_stats_shape(call), dtype=accumulation_dtype(q.dtype))
    with torch.no_grad(), collected_kernels() as found:
        function_of(chosen, "backward")(chosen, call, needs, out, row_stats, torch.empty_like(out), None)
    return found
