"""The launch of a backward pass whose sequences are one tile each."""

import math
from functools import partial

import torch
from torch import Tensor

from ...call.call import Call, Gradients, Needs, new_rows
from ..epilogue import requested_from_rows
from ..gpu.kernel import Kernel
from ..scalars import dlse_strides, lse_strides, strides
from . import arguments as args
from .configs import KernelConfig
from .gradients import new_bias_gradients, new_key_rows, slope_gradient, sum_of_splits
from .launches import BackwardLaunches

SHORT = Kernel(f"{__package__}.kernels.short", "short_kernel")
MOST_STRIDE = 2**20  # elements from row to row
PROGRAMS = 2048  # that share the work of a bias's gradient


def is_one_tile(launches: BackwardLaunches, needs: Needs, out: Tensor) -> bool:
    """Whether one kernel makes all gradients: those of q, k and v, and none that needs statistics of rows. Within a
    head, its offsets have 32 bits, and with dropout its block of keys begins where eight keys share random bits.
    """
    settings = launches.call.settings
    aligned = settings.dropout_p == 0 or settings.j0 % 8 == 0
    other = requested_from_rows(needs, launches.call.tensors) or any(needs.score_mod_tensors)
    near = all(x.stride(2) < MOST_STRIDE for x in (launches.q, launches.k, launches.v, out, launches.dout))
    return needs.q and needs.k and needs.v and near and aligned and not other


def launch_short(
    launches: BackwardLaunches, config: KernelConfig, needs: Needs, out: Tensor, lse: Tensor, dlse: Tensor | None
) -> Gradients:
    """The gradients of a call, by one launch."""
    recorder, call = launches.recorder, launches.call
    t = call.tensors
    dq = recorder.new(new_rows(t.q, t.q.shape[1], t.q.shape[-1], t.q.dtype))
    dk, dv = (recorder.new(new_key_rows(call, x)) for x in (t.k, t.v))
    dslopes = recorder.new(torch.empty_like(lse)) if needs.alibi_slopes else None
    heads = shared_heads(call, t.bias if needs.bias else None)
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
        **args.constants(call, config, align),
        "num_tiles": None,
        "scale": call.settings.scale,
    }
    results = {"dq": dq, "dk": dk, "dv": dv, "dslopes": dslopes, "dbias": dbias}
    launches.launch(SHORT, {"out": out, "lse": lse, "dlse": dlse, **results}, programs, scalars)
    return Gradients(
        q=dq,
        k=dk,
        v=dv,
        bias=None if dbias is None else recorder.op(sum_of_splits, dbias),
        alibi_slopes=None if dslopes is None else recorder.op(slope_gradient, t.alibi_slopes, None, dslopes),
        score_mod_tensors=(None,) * len(needs.score_mod_tensors),
    )


def shared_heads(call: Call, bias: Tensor | None) -> dict[str, int]:
    """The scalars of `short.SharedHeads`, and the number of programs."""
    counts = call.tensors.q.shape[:2]
    own = counts if bias is None else [min(n, count) for n, count in zip(bias.shape, counts, strict=False)]
    shared = [count // max(mine, 1) for mine, count in zip(own, counts, strict=True)]
    splits = max(1, min(math.prod(shared), PROGRAMS // max(math.prod(own), 1)))
    programs = math.prod(own) * splits if math.prod(shared) > 0 else 0
    return {"tiles_h": own[1], "shared_b": shared[0], "shared_h": shared[1], "splits": splits, "programs": programs}
