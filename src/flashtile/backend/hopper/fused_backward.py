"""The launches of a backward pass in one kernel, which adds dq up in memory, and of what makes dq of the sums."""

from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Needs, Tensors
from ..gpu.pointers import Described
from ..gpu.replay import Recorder, Results
from ..scalars import strides
from .backward_launches import WARPS, BackwardPass
from .descriptors import sums
from .kernels.backward.fused import backward_kernel
from .kernels.rows import finish_kernel
from .tables import ALIGN, HALVES, ROWS, BackwardLaunch


class FusedPass(BackwardPass):
    tile: BackwardLaunch

    def __init__(self, recorder: Recorder, tile: BackwardLaunch, call: Call, t: Tensors, dout: Tensor):
        super().__init__(recorder, tile, call, t, dout)
        self.turns = self.empty(self.extent.heads * self.extent.row_blocks, HALVES, dtype=torch.int32)
        self.sums = self.empty(self.extent.heads * self.padded_rows, tile.head_dim.width)

    def run(self, out: Tensor, lse: Tensor, dlse: Tensor | None, _: Needs) -> Results:
        """dq, dk and dv, all of which one kernel computes."""
        self.prepare(out, lse, dlse, self.turns)
        dk, dv = self.results_of_keys()
        box = (ROWS, self.tile.head_dim.box)
        pointers = {
            **self.rows_and_keys(),
            **self.described_numbers(),
            "dq_desc": Described(self.sums, sums, (ROWS, min(share.width for share in self.tile.shares))),
            "dk_desc": Described(dk, self.described, box),
            "dv_desc": Described(dv, self.described, box),
            "turns": self.turns,
        }
        bytes_of_row = self.tile.head_dim.width * (2 * self.q.element_size() + self.sums.element_size())
        self.recorder.launch(backward_kernel, pointers, self.programs, self.numbers_of_keys(bytes_of_row))
        return self.finish(), dk, dv

    def finish(self) -> Tensor:
        dq = self.result_of_rows()
        scalars: dict[str, Any] = {
            **self.of_rows(),
            **strides("dq", dq, ALIGN),
            "scale": self.call.settings.scale,
            "HEAD_DIM": self.tile.head_dim,
            "ALIGN": ALIGN,
            "BLOCK_M": self.tile.block_m,
            "num_warps": WARPS,
        }
        pointers = {"sums": self.sums, "turns": self.turns, "dq": dq, "cu_seqlens_q": self.cu_seqlens_q}
        self.recorder.launch(finish_kernel, pointers, self.extent.heads * self.extent.row_blocks, scalars)
        return dq
