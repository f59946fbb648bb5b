"""The backward pass of a call: numbers of rows first, then one kernel or, for wide heads, two."""

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs, Tensors
from ...memory import memory_of
from ...plan import Plan
from ..common import passes
from ..common.passes import Recorder, Results
from .descriptors import copyable
from .fused_pass import FusedPass
from .tables import BackwardLaunch, WideBackward
from .wide_pass import WidePass


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    results, tile = (out, lse, dout, dlse), plan.tile.backward
    key = ("hopper backward", tile, needs, call.signature(), *map(memory_of, results))
    dq, dk, dv, dsinks = passes.run(key, (*call.tensors[:-1], *results), record_backward, tile, call, needs)
    return Gradients(q=dq, k=dk, v=dv, sinks=dsinks)


def record_backward(recorder: Recorder, tile: BackwardLaunch | WideBackward, call: Call, needs: Needs) -> Results:
    *given, out, lse, dout, dlse = recorder.given
    assert out is not None
    assert lse is not None
    out, lse = recorder.computed(copyable, out), recorder.computed(Tensor.contiguous, lse)
    dout = recorder.computed(torch.zeros_like, out) if dout is None else recorder.computed(copyable, dout)
    tensors = Tensors(*given)  # type: ignore[arg-type]
    if tile.kind == "wide":
        pass_ = WidePass(recorder, tile, call, tensors, dout)
    else:
        pass_ = FusedPass(recorder, tile, call, tensors, dout)
    dq, dk, dv = pass_.run(out, lse, dlse, needs)
    dsinks = pass_.sink_gradient() if needs.sinks else None
    return dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, dsinks
