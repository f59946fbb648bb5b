"""The launches of a backward pass: one for all gradients, or row statistics first and a kernel for each kind."""

from functools import partial
from typing import Any

from torch import Tensor

from ....call.call import Call, Gradients, Needs, Tensors
from ....call.plan import Plan
from ...epilogue import requested_from_rows
from ...gpu import replay
from ...gpu.pairs import with_aligned_bias, with_contiguous_keys
from ...gpu.replay import Recorder
from ...replays import BackwardReplay, Results
from ...scalars import rows_last
from . import products
from .backward_launches import BackwardLaunches, Rows
from .called import called_tile, is_fused, is_one_loop, multiplies
from .fused import launch_fused
from .gradients import (
    from_row_stats,
    in_pages,
    lse_of,
    no_gradient,
    residual_of,
    slope_gradient,
)

ALIGNED_FROM = 128  # rows and keys above which copying a bias with unaligned rows pays


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    inputs = (*call.inputs, out, lse, dout, dlse, call.kept)
    return Gradients.from_flat(replay.run(inputs, launch_backward, plan, call, needs))


def record_backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, Gradients]:
    """As `backward`, and the function that repeats it for calls of the same layout; its gradients are flat."""
    inputs = (*call.inputs, out, lse, dout, dlse, call.kept)
    recording, results = replay.record(inputs, launch_backward, plan, call, needs)
    return BackwardReplay(recording), Gradients.from_flat(results)


def launch_backward(recorder: Recorder, plan: Plan, call: Call, needs: Needs) -> Results:
    *given, out, lse, dout, dlse, mask_states = recorder.inputs
    assert out is not None
    assert lse is not None
    out, row_stats = recorder.op(rows_last, out), recorder.op(Tensor.contiguous, lse)
    dout = recorder.op(no_gradient, out) if dout is None else recorder.op(rows_last, dout)
    call = with_contiguous_keys(recorder, call._replace(tensors=Tensors.from_flat(given)))
    if not needs.bias:  # whose gradient has its shape
        call = with_aligned_bias(recorder, call, ALIGNED_FROM)
    t = call.tensors
    lse, residual = recorder.op(lse_of, out, row_stats), None
    if row_stats.dim() == out.dim():
        residual = recorder.op(residual_of, row_stats)
    of_rows = Rows(out, lse, residual, dlse)
    tile = called_tile(plan.tile, call)
    launches = BackwardLaunches(recorder, call, dout, mask_states)
    fused, rows = tile.fused, (launches.q, launches.k, launches.v, out, launches.dout)
    if fused is not None and is_fused(fused, call, needs, rows):
        return launch_fused(launches, fused, needs, of_rows).flat()
    launches.preprocess(of_rows)
    slopes = needs.alibi_slopes
    if multiplies(tile, needs):
        dq, dk, dv, dslopes = products.launch_backward(launches, needs)
    elif tile.one_loop is not None and is_one_loop(tile, needs):
        dq, dk, dv = launches.one_loop(tile.one_loop)
        dslopes = None
    else:
        dk, dv = launches.dkdv(tile.dkdv) if needs.k or needs.v else (None, None)
        dq, dslopes = launches.dq(tile.dq, lse, slopes) if needs.q or slopes else (None, None)
    dbias = launches.dbias(tile.dbias or tile.dq) if needs.bias else None
    if slopes:
        dslopes = recorder.op(slope_gradient, t.alibi_slopes, t.cu_seqlens_q, dslopes)
    if call.layout == "paged":  # dk and dv are by position
        dk, dv = (
            None if dx is None else recorder.op(in_pages, x, t.page_table, dx) for x, dx in ((t.k, dk), (t.v, dv))
        )
    dcaptured = launches.dcaptured(tile.dq, needs.score_mod_tensors)
    from_rows = {
        name: recorder.op(partial(from_row_stats, gradient), t.sinks, launches.row_stats, lse, residual, dlse)
        for name, gradient in requested_from_rows(needs, t)
    }
    dq, dk, dv = (dx if needed else None for dx, needed in zip((dq, dk, dv), needs, strict=False))
    grads = Gradients(
        q=dq, k=dk, v=dv, bias=dbias, alibi_slopes=dslopes, score_mod_tensors=tuple(dcaptured), **from_rows
    )
    return grads.flat()
