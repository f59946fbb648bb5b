"""The launches of a backward pass of wide heads: a kernel for dq, one for dk and dv."""

from torch import Tensor

from ...call.call import Call, Needs, Tensors
from ..gpu.replay import Recorder, Results
from ..scalars import strides
from .backward_launches import BackwardPass
from .kernels.dkdv.dkdv import wide_keys_kernel
from .kernels.dq.dq import wide_rows_kernel
from .lengths import lengths_of
from .tables import ALIGN, WideBackward


class WidePass(BackwardPass):
    def __init__(self, recorder: Recorder, tile: WideBackward, call: Call, t: Tensors, dout: Tensor):
        super().__init__(recorder, tile.keys, call, t, dout)
        self.tile_of_rows = tile.rows

    def run(self, out: Tensor, lse: Tensor, dlse: Tensor | None, needs: Needs) -> Results:
        """dq, dk and dv, where they are needed."""
        self.prepare(out, lse, dlse, None)
        dk, dv = self.gradients_of_keys() if needs.k or needs.v else (None, None)
        return self.gradient_of_rows() if needs.q else None, dk, dv

    def gradient_of_rows(self) -> Tensor:
        dq = self.result_of_rows()
        lengths = lengths_of(self.call, self.tile_of_rows.block_m)
        scalars = {
            **self.common_numbers(),
            **lengths,
            **strides("dq", dq, ALIGN),
            "num_heads": self.q.shape[1],
            "TILE": self.tile_of_rows,
        }
        pointers = {**self.rows_and_keys(), "start": self.start, "delta": self.delta, "dq": dq}
        self.recorder.launch(wide_rows_kernel, pointers, min(self.cores, lengths["num_tiles"]), scalars)
        return dq

    def gradients_of_keys(self) -> tuple[Tensor, Tensor]:
        dk, dv = self.results_of_keys()
        bytes_of_row = (self.q.shape[-1] + self.v.shape[-1]) * self.q.element_size()
        scalars = {**self.numbers_of_keys(bytes_of_row), **strides("dk", dk, ALIGN), **strides("dv", dv, ALIGN)}
        pointers = {**self.rows_and_keys(), **self.described_numbers(), "dk": dk, "dv": dv}
        self.recorder.launch(wide_keys_kernel, pointers, self.programs, scalars)
        return dk, dv
