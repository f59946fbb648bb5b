"""The backward pass of float32: two kernels, which read rows in bfloat16 parts."""

from torch import Tensor

from ....call.call import Call, Tensors
from ...gpu.replay import Recorder
from ..backward_config import SplitBackwardConfig
from .float32 import num_parts, split_rows
from .split_backward import SplitBackward


class Float32Backward(SplitBackward):
    """The split backward pass on rows in parts."""

    def __init__(self, recorder: Recorder, config: SplitBackwardConfig, call: Call, t: Tensors, dout: Tensor):
        super().__init__(recorder, config.with_parts(num_parts()), call, t, dout)
        self.parts = split_rows(recorder, (self.q, self.k, self.v, dout), self.config.head_dim)
        self.follows_copy = True

    def inputs(self) -> tuple[Tensor, ...]:
        return self.parts
