"""Arguments of the kernels for bias and mask, `[B, H, Sq, Sk]` with any dimension broadcast."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Tensors
from ..gpu.pointers import Described, Pointers
from ..gpu.replay import Recorder
from ..scalars import pair_rows, pair_strides, rows_last
from .support import TMA_ALIGNMENT
from .tables import ALIGN


class PairArguments(NamedTuple):
    """Pointers and scalars of `kernels.shared.pairs`, and the unit of the strides in elements."""

    pointers: Pointers
    scalars: dict[str, Any]
    align: int

    @classmethod
    def of(cls, recorder: Recorder, t: Tensors) -> "PairArguments":
        """The arguments of a call. Keys become contiguous."""
        if t.bias is None and t.mask is None:
            return ABSENT
        bias, mask = (None if x is None else recorder.op(rows_last, x) for x in (t.bias, t.mask))
        tensors = {"bias": bias, "mask": mask}
        strides = {name: stride for x in tensors for name, stride in pair_strides(x, tensors[x]).items()}
        aligned = all(x is None or x.data_ptr() % TMA_ALIGNMENT == 0 for x in (bias, mask))
        aligned &= all(n is None or n % ALIGN == 0 for name, n in strides.items() if name[-1] != "n")
        unit = ALIGN if aligned else 1
        for name, stride in strides.items():
            strides[name] = stride if stride is None or name[-1] == "n" else stride // unit
        bytes_of_mask = None if mask is None else Described(mask, Tensor.view, torch.uint8)
        return cls({"bias": bias, "mask": bytes_of_mask}, {**strides, "pair_rows": pair_rows(t)}, unit)


ABSENT = PairArguments(
    {"bias": None, "mask": None}, {**pair_strides("bias", None), **pair_strides("mask", None), "pair_rows": None}, 1
)
