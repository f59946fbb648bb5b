"""The backward pass of a call: numbers of rows first, then one kernel or, for wide heads, two."""

from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, Tensors
from ...call.plan import Plan
from ..gpu import replay
from ..gpu.replay import Recorder, Results
from .descriptors import copyable
from .fused_backward import FusedPass
from .split_backward import WidePass
from .tables import BackwardLaunch, WideBackward


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    inputs = (*call.inputs, out, lse, dout, dlse)
    return gradients(replay.run(inputs, launch_backward, plan.tile.backward, call, needs))


def record_backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, Gradients]:
    """As `backward`, and the function that repeats it for calls of the same layout."""
    inputs, tile = (*call.inputs, out, lse, dout, dlse), plan.tile.backward
    recording, results = replay.record(inputs, launch_backward, tile, call, needs)
    return lambda call, *rows: gradients(recording((*call.inputs, *rows))), gradients(results)


def gradients(results: Results) -> Gradients:
    dq, dk, dv, dsinks = results
    return Gradients(q=dq, k=dk, v=dv, sinks=dsinks)


def launch_backward(recorder: Recorder, tile: BackwardLaunch | WideBackward, call: Call, needs: Needs) -> Results:
    *given, out, lse, dout, dlse = recorder.inputs
    assert out is not None
    assert lse is not None
    out, lse = recorder.op(copyable, out), recorder.op(Tensor.contiguous, lse)
    dout = recorder.op(torch.zeros_like, out) if dout is None else recorder.op(copyable, dout)
    tensors = Tensors(*given)  # type: ignore[arg-type]
    if tile.kind == "wide":
        pass_ = WidePass(recorder, tile, call, tensors, dout)
    else:
        pass_ = FusedPass(recorder, tile, call, tensors, dout)
    dq, dk, dv = pass_.run(out, lse, dlse, needs)
    dsinks = pass_.sink_gradient() if needs.sinks else None
    return dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, dsinks
