"""The launch of a backward pass in one kernel, where all rows or all keys of a head are one block."""

import math
from functools import partial

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Needs, new_rows
from ...gpu.kernel import Kernel
from ...scalars import dlse_strides, lse_strides, strides
from ..tile_config import FusedConfig
from . import KERNELS
from . import arguments as args
from .backward_launches import BackwardLaunches, Rows
from .gradients import new_bias_gradients, new_key_rows, slope_gradient, sum_of_splits
from .semaphores import new_semaphores

FUSED = Kernel(f"{KERNELS}.fused", "fused_kernel")
PROGRAMS = 2048  # that share the work of a bias's gradient


def launch_fused(launches: BackwardLaunches, config: FusedConfig, needs: Needs, rows: Rows) -> Gradients:
    """The gradients of a call, by one launch."""
    recorder, call = launches.recorder, launches.call
    t, (out, lse, _, dlse) = call.tensors, rows
    dq = recorder.new(new_rows(t.q, t.q.shape[1], t.q.shape[-1], t.q.dtype))
    dk, dv = (recorder.new(new_key_rows(call, x)) for x in (t.k, t.v))
    dslopes = recorder.new(slopes_of_splits(config, lse)) if needs.alibi_slopes else None
    heads = shared_heads(call, t.bias if needs.bias else None, config)
    splits, programs = heads["splits"], heads.pop("programs")
    dbias = recorder.op(partial(new_bias_gradients, splits, programs > 0), t.bias) if needs.bias else None
    given, align = launches.row_inputs(out, dq, dk, dv)
    scalars = {
        **given,
        **strides("out", out, align),
        **strides("dq", dq, align),
        **strides("dk", dk, align, keys=True),
        **strides("dv", dv, align, keys=True),
        **lse_strides(lse),
        **dlse_strides(dlse),
        **args.row_strides("dslopes", dslopes),
        **args.dbias_strides(dbias),
        **heads,
        **args.constants(call, config.tile, align),
        "WALK": config.walk,
        "num_tiles": None,
        "scale": call.settings.scale,
    }
    results = {"dq": dq, "dk": dk, "dv": dv, "dslopes": dslopes, "dbias": dbias, **partials(launches, config)}
    launches.launch(FUSED, {**rows._asdict(), **results}, programs, scalars)
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        bias=None if dbias is None else recorder.op(sum_of_splits, dbias),
        alibi_slopes=None if dslopes is None else recorder.op(slope_gradient, t.alibi_slopes, t.cu_seqlens_q, dslopes),
        score_mod_tensors=(None,) * len(needs.score_mod_tensors),
    )


def partials(launches: BackwardLaunches, config: FusedConfig) -> dict[str, Tensor | None]:
    """The sums of each program of a walk that several share, and their semaphores (`fused.Partials`)."""
    recorder, (q, k, v, *_) = launches.recorder, launches.call.tensors
    absent: dict[str, Tensor | None] = dict.fromkeys(("partial_a", "partial_b", "semaphores"))
    if config.splits == 1:
        return absent
    summed = {"partial_a": q} if config.walk == "keys" else {"partial_a": k, "partial_b": v}
    parts = {name: ((config.splits, *x.shape), torch.float32) for name, x in summed.items()}
    semaphores = recorder.op(partial(new_semaphores, q.device, math.prod(q.shape[:2])))
    return absent | recorder.workspace(q, parts) | {"semaphores": semaphores}


def slopes_of_splits(config: FusedConfig, lse: Tensor) -> Tensor:
    """The parts of rows in the gradients of slopes, for each split of a walk over keys, one after another."""
    *heads, rows = lse.shape
    return lse.new_empty((*heads, rows * (config.splits if config.walk == "keys" else 1)))


def shared_heads(call: Call, bias: Tensor | None, config: FusedConfig) -> dict[str, int]:
    """The scalars of `fused.SharedHeads`, and the number of programs; packed tokens of no sequence are one more."""
    t = call.tensors
    counts = t.q.shape[:2] if t.cu_seqlens_q is None else (t.cu_seqlens_q.shape[0], t.q.shape[1])
    own = counts if bias is None else [min(n, count) for n, count in zip(bias.shape, counts, strict=False)]
    shared = [count // max(mine, 1) for mine, count in zip(own, counts, strict=True)]
    splits = max(config.splits, min(math.prod(shared), PROGRAMS // max(math.prod(own), 1)))
    programs = math.prod(own) * splits if math.prod(shared) > 0 else 0
    return {"tiles_h": own[1], "shared_b": shared[0], "shared_h": shared[1], "splits": splits, "programs": programs}
