"""Whether what backward gets fits its call. Saved tensors may come back from hooks as others, and programs may call the
operators themselves.
"""

import torch
from torch import Tensor

from ..errors import ArgumentError
from .call import Call, lse_shape, row_stats_shape
from .check import EXAMPLES, memory
from .problem import accumulation_dtype


def check_results(call: Call, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None) -> None:
    """Shapes, dtypes, devices and memory of `out`, `lse` and their gradients. Nothing is read. `lse` may lack the
    residual that its call keeps.

    Raises:
        ArgumentError: one of them is not that of the call's results.
    """
    t = call.tensors
    memory({"out": out, "lse": lse, "dout": dout, "dlse": dlse}, call.layout)
    of_out = (*t.q.shape[:-1], t.v.shape[-1]), t.q.dtype
    of_lse = lse_shape(t.q), accumulation_dtype(t.q.dtype)
    of_row_stats = of_lse if lse.dim() < t.q.dim() else (row_stats_shape(call), of_lse[1])
    for name, x, (shape, dtype) in (
        ("out", out, of_out),
        ("lse", lse, of_row_stats),
        ("dout", dout, of_out),
        ("dlse", dlse, of_lse),
    ):
        if x is None:
            continue
        same = x.shape == shape and x.dtype == dtype and x.device == t.q.device and x.layout is torch.strided
        if not same:
            accepted = (
                f"shape {list(shape)}, dtype {dtype}, on {t.q.device}, as in forward, also after hooks of "
                "torch.autograd.graph.saved_tensors_hooks"
            )
            raise ArgumentError(name, x, accepted, EXAMPLES[call.layout])
