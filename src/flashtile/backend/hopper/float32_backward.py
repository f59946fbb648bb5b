"""The backward pass of float32: that of two kernels, which read rows in bfloat16 parts."""

from torch import Tensor

from ...call.call import Call, Tensors
from ..gpu.replay import Recorder
from .descriptors import tma_aligned
from .float32 import num_parts, split_rows
from .split_backward import SplitBackward
from .tables import SplitBackwardConfig


class Float32Backward(SplitBackward):
    """The split backward pass on rows in parts."""

    def __init__(self, recorder: Recorder, config: SplitBackwardConfig, call: Call, t: Tensors, dout: Tensor):
        super().__init__(recorder, config.with_parts(num_parts()), call, t, dout)
        rows = (recorder.op(tma_aligned, x) for x in (self.q, self.k, self.v, dout))
        self.parts = tuple(split_rows(recorder, x, self.config.head_dim) for x in rows)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.parts
