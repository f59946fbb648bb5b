"""Host code of the backward pass: record or replay its launches."""

from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Needs, Tensors
from ....call.plan import Plan
from ...gpu import replay
from ...gpu.replay import Recorder
from ...replays import BackwardReplay, Results
from ..backward_config import FusedBackwardConfig, SplitBackwardConfig
from .backward_launches import Rows
from .descriptors import tma_aligned
from .float32_backward import Float32Backward
from .forward import lse_of, residual_of
from .fused_backward import FusedBackward
from .split_backward import SplitBackward


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    inputs = (*call.inputs, out, lse, dout, dlse, call.kept)
    return Gradients.from_flat(replay.run(inputs, launch_backward, plan.tile.backward, call, needs))


def record_backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Any, Gradients]:
    """As `backward`, and the function that repeats it for calls of the same layout; its gradients are flat."""
    inputs, config = (*call.inputs, out, lse, dout, dlse, call.kept), plan.tile.backward
    recording, results = replay.record(inputs, launch_backward, config, call, needs)
    return BackwardReplay(recording), Gradients.from_flat(results)


def launch_backward(
    recorder: Recorder, config: FusedBackwardConfig | SplitBackwardConfig, call: Call, needs: Needs
) -> Results:
    """Record the launches of a backward pass."""
    *inputs, out, lse, dout, dlse, mask_states = recorder.inputs
    assert out is not None
    assert lse is not None
    out, row_stats = recorder.op(tma_aligned, out), recorder.op(Tensor.contiguous, lse)
    lse, residual = recorder.op(lse_of, out, row_stats), None
    if row_stats.dim() == out.dim():
        residual = recorder.op(residual_of, row_stats)
    rows = Rows(out, lse, residual, dlse)
    dout = recorder.op(torch.zeros_like, out) if dout is None else recorder.op(tma_aligned, dout)
    tensors = Tensors.from_flat(inputs)
    if config.kind == "split":
        kind = Float32Backward if out.dtype is torch.float32 else SplitBackward
        launches = kind(recorder, config, call, tensors, dout)
    else:
        launches = FusedBackward(recorder, config, call, tensors, dout, mask_states)
    dq, dk, dv = launches.run(rows, needs)
    dq, dk, dv = (dx if needed else None for dx, needed in zip((dq, dk, dv), needs, strict=False))
    captured = (None,) * len(tensors.score_mod_tensors)
    others = launches.gradients_from_rows(needs, rows) | launches.gradients_of_terms(needs)
    return Gradients(q=dq, k=dk, v=dv, score_mod_tensors=captured, **others).flat()
