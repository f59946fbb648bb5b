"""Gradients of one sequence in float64, each by its formula, in the reverse order of the forward.

ds = p * (dp - delta) is a difference of dot products, and the errors of dp and delta do not shrink with it. So three
sizes of ds go into the bounds in addition to its value (see `Weights`):

- absolute: p * (D + sum_j p * D + |dlse|) with D = sum |dout||v|, since dp and delta are sums of such terms in the
  accumulation dtype.
- root: p * (|dp| + |delta|), since every ds is rounded to the input dtype.
- shared: p * root(sum_d (out * dout)^2 + sum_j (p * dp)^2), since a kernel forms delta from an `out` that was
  rounded to the input dtype, as P was before. All keys of the row share this error.
"""

import torch
from torch import Tensor

from .forward import INF, Forward, is_finite, sink_column
from .sequence import Sequence
from .sums import Sums, group_sum, pair_products, reduce_to
from .weights import Weights


def backward(x: Sequence, f: Forward) -> dict[str, Sums]:
    """dq, dk, dv, dbias and dscore_mod_<n> in the shapes of their inputs; dalibi_slopes and dsinks [Hq]."""
    ds, dsink = score_gradients(x, f)
    loose = ~is_finite(f.p)  # heads with a NaN or infinity: gradients may carry it to other rows
    for tensor in (x.q, f.k, f.v, x.dlse, *(() if x.dout is None else (x.dout,))):
        loose = loose | ~is_finite(tensor)
    sums: dict[str, Sums] = {}

    if x.sinks is not None:
        dsinks = reduce_to(dsink, torch.ones_like(dsink.value, dtype=torch.bool), f.A, loose, (len(loose), 1, 1))
        sums["dsinks"] = dsinks.map(lambda part: part[:, 0, 0])
    if f.modification is not None:
        for n, tensor in enumerate(x.score_tensors):
            if tensor.is_floating_point():
                sums[f"dscore_mod_{n}"] = f.modification.tensor_sums(n, ds, f.p, f.visible, f.A, loose)
        derivative = f.modification.derivative
        ds = ds.times(derivative, absolute=1 + derivative.abs())  # the user's function may compute it in any way
    if x.alibi_slopes is not None:
        dslopes = reduce_to(ds.times(-f.distance), f.visible, f.A, loose, (len(loose), 1, 1))
        sums["dalibi_slopes"] = dslopes.map(lambda part: part[:, 0, 0])
    if x.bias is not None:
        sums["dbias"] = reduce_to(ds, f.visible, f.A, loose, x.bias.shape)
    if f.tanh is not None:
        ds = ds.times(1 - f.tanh.square(), absolute=1 + f.tanh.square())
    ds = ds.times(x.scale)

    seen = f.visible.mT  # [Hq, Sk, Sq]
    row_A = torch.cat([f.A[:, None, :].where(seen, 0.0), seen.new_zeros(len(loose), seen.shape[1], 1)], dim=2)
    key_A = row_A.amax(2)  # largest of the rows that see the key, [Hq, Sk]
    sums["dq"] = pair_products(ds, f.k, f.visible, f.A, loose)
    sums["dk"] = group_sum(pair_products(ds.mT, x.q, seen, key_A, loose), x.group)
    if x.dout is None:
        dv = Sums.zeros(f.v.shape)
        dv.loose |= loose[:, None, None]
    else:
        dv = pair_products(f.kept.mT, x.dout, seen, key_A, loose)
    sums["dv"] = group_sum(dv, x.group)
    return sums


def score_gradients(x: Sequence, f: Forward) -> tuple[Weights, Weights]:
    """Gradients of the final scores [Hq, Sq, Sk] and of the sink as a score [Hq, Sq, 1]."""
    dlse = x.dlse[:, :, None]  # [Hq, Sq, 1]
    dp = dp_absolute = torch.zeros_like(f.p)
    out_dout, out_loss = torch.zeros_like(f.out.total), torch.zeros_like(dlse)
    if x.dout is not None:
        keep = torch.ones_like(f.p) if x.keep is None else x.keep
        dout = x.dout.where(f.visible.any(2, keepdim=True), 0.0)  # no gradient of `out` passes through an empty row
        dp = (keep * (dout @ f.v.mT)).where(f.visible, 0.0)
        dp_absolute = (keep * (dout.abs() @ f.v.abs().mT)).where(f.visible, 0.0)
        out_dout, out_loss = f.out.total * dout, row_sum(dout.abs())
    delta = row_sum(f.p * dp) - dlse  # <out, dout> - dlse with out as it is, not rounded

    absolute = row_sum(f.p * dp_absolute) + dlse.abs()
    shared = (row_sum(out_dout.square()) + row_sum((f.p * dp).square())).sqrt()
    loss = row_sum(dp_absolute) + out_loss
    ds = Weights(
        value=f.p * (dp - delta),
        absolute=f.p * (dp_absolute + absolute),
        root=f.p * (dp.abs() + delta.abs()),
        shared=f.p * shared,
        loss=f.p * loss,
    )
    # Where the row sees nothing lse is the sink and p is 1, an infinite sink included.
    sink = sink_column(x)
    p_sink = (sink - f.lse[:, :, None]).exp().where(sink != -INF, 0.0).where(sink != INF, 1.0)
    dsink = Weights(
        value=-p_sink * delta,
        absolute=p_sink * absolute,
        root=p_sink * delta.abs(),
        shared=p_sink * shared,
        loss=p_sink * loss,
    )
    return ds.map(lambda part: part.where(f.visible, 0.0)), dsink


def row_sum(x: Tensor) -> Tensor:
    return x.sum(2, keepdim=True)
