"""Arguments of dropout for kernels that compute probabilities."""

from typing import Any

from ....call.call import Call
from ....call.problem import OCTET
from ...gpu.pointers import Pointers
from ...scalars import keep_scale, threshold

NAMES = ("dropout_first_head", "dropout_heads", "dropout_i0", "dropout_octet0", "threshold", "keep_scale")


def dropout_pointers(call: Call) -> Pointers:
    return {"seed": call.tensors.dropout_seed if call.settings.dropout_p > 0 else None}


def dropout_scalars(call: Call) -> dict[str, Any]:
    """Scalars of `kernels.shared.dropout.Dropout`."""
    s = call.settings
    if s.dropout_p == 0:
        return dict.fromkeys(NAMES)
    limit = threshold(s.dropout_p)
    first_head = s.b0 * call.num_heads + s.h0
    return dict(zip(NAMES, (first_head, call.num_heads, s.i0, s.j0 // OCTET, limit, keep_scale(limit)), strict=True))
