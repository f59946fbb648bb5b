"""The gradients of attention from results that the caller has kept, which other libraries' names can return."""

from typing import Any

import torch
from torch import Tensor

from ..call.call import differentiable_positions
from ..dispatch.operators import operators_of
from .normalize import normalize, require_tensors


@torch.no_grad()
def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v by the backward pass alone. `out` and `lse` may be those over more keys than k has,
    as in a ring of ranks: the result then is the part of the gradients that comes from k and v.

    Args:
        q, k, v: as in `attention`, or with `cu_seqlens_q` as in `attention_varlen`.
        out, lse: the results, of q's dtype, and float32 (float64 for float64 inputs).
        dout: the gradient of `out`, of its shape and dtype.
        settings: the other keywords of `attention` or `attention_varlen` but `num_splits`.

    Returns:
        The gradients of q, k and v, in their shapes and dtypes.

    Raises:
        ArgumentError: an argument is not what it should be.
    """
    function = "attention" if cu_seqlens_q is None else "attention_varlen"
    tensors: dict[str, Any] = {"q": q, "k": k, "v": v, "mask": None, "bias": None, "alibi_slopes": alibi_slopes}
    tensors["sinks"] = None
    if cu_seqlens_q is not None:
        tensors |= {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    call = normalize(function, tensors, score_mod=None, dropout_seed=dropout_seed, backend="auto", **settings)
    results = {"out": out, "lse": lse, "dout": dout}  # the operator checks the rest
    require_tensors(function, results, tuple(results))
    others = len(differentiable_positions(len(call.tensors.flat()))) - 3
    needs = [True, True, True, *[False] * others]
    dq, dk, dv = operators_of(call).differentiate(needs, out, lse.contiguous(), dout, None, call)[:3]
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return dq, dk, dv
