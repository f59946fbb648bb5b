"""Launches of the split backward pass for head dimensions over 128: one kernel for dq, one for dk and dv.

The second one is the dependent of the first: its programs begin where the first one's are done, so that the cores
that the last wave of the first leaves idle have work. Its blocks are half as long, and leave fewer idle at its own end.
"""

import torch
from torch import Tensor

from ....call.call import Call, Needs, Tensors
from ...gpu.kernel import Kernel
from ...gpu.replay import Recorder, Results
from ...scalars import strides
from ..tile_config import ALIGN, MMA_M, OVERLAPPING, SplitBackwardConfig
from . import KERNELS
from .backward_launches import BackwardLaunches, Rows
from .scheduler_args import scheduler_args

DKDV = Kernel(f"{KERNELS}.dkdv.dkdv", "dkdv_kernel")
DQ = Kernel(f"{KERNELS}.dq.dq", "dq_kernel")


class SplitBackward(BackwardLaunches):
    """The split backward pass: preprocess, dq, dkdv."""

    def __init__(self, recorder: Recorder, config: SplitBackwardConfig, call: Call, t: Tensors, dout: Tensor):
        super().__init__(recorder, config.dkdv, call, t, dout)
        self.dq_config = config.dq

    def run(self, rows: Rows, needs: Needs) -> Results:
        """Launch the kernels whose gradients are needed; returns dq, dk and dv."""
        self.preprocess(rows)
        # Nothing else may be launched between the two kernels, such as zeros for dk.
        dk, dv = self.new_dk_dv() if needs.k or needs.v else (None, None)
        dq = self.launch_dq() if needs.q else None
        if dk is not None and dv is not None:
            self.launch_dkdv(dk, dv, dependent=needs.q)
        return dq, dk, dv

    def launch_dq(self) -> Tensor:
        dq = self.new_dq()
        scheduling = scheduler_args(self.call, self.dq_config)
        scalars = {
            **self.common_scalars(),
            **scheduling,
            **strides("dq", dq, ALIGN),
            "num_heads": self.q.shape[1],
            "columns": self.config.head_dim.columns_of(self.q),
            "CONFIG": self.dq_config.compiled,
            **OVERLAPPING,
        }
        row_stats = {name: self.workspace.get(name) for name in ("neg_lse", "neg_residual", "neg_delta")}
        semaphore = {"tile_count_semaphore": self.workspace["tile_count_semaphore_2"]}
        pointers = {**self.input_pointers(MMA_M, self.dq_config.block_n), **row_stats, **semaphore, "dq": dq}
        self.launch(DQ, pointers, min(self.cores, scheduling["num_tiles"]), scalars)
        return dq

    def launch_dkdv(self, *results: Tensor, dependent: bool) -> None:
        """Launch the kernel for dk and dv; as a `dependent`, right behind that for dq."""
        parts = self.config.head_splits
        dk, dv = results if parts == 1 else (self.new_parts(x) for x in (self.k, self.v))
        scalars = {
            **self.key_kernel_scalars(),
            **strides("dk", dk, ALIGN),
            **strides("dv", dv, ALIGN),
            "head_splits": parts if parts > 1 else None,
            "columns": self.config.head_dim.columns_of(self.k),
            "columns_v": self.config.head_dim_v.columns_of(self.v),
            "CONFIG": self.config.compiled,
            **(OVERLAPPING if dependent else {}),
        }
        pointers = {**self.input_pointers(self.config.block_m), **self.row_stats_pointers(), "dk": dk, "dv": dv}
        self.launch(DKDV, pointers, self.programs, scalars)
        if parts > 1:
            for x, dx in zip((dk, dv), results, strict=True):
                self.recorder.effect(add_parts, x, dx)

    def new_parts(self, x: Tensor) -> Tensor:
        """Buffer for dk or dv of each part of a group of query heads, `[B, Hk * parts, Sk, D]` in fp32."""
        batch, heads, seqlen_k, width = x.shape
        shape = batch, heads * self.config.head_splits, seqlen_k, width
        return self.recorder.new(x.new_empty(shape, dtype=torch.float32))


def add_parts(parts: Tensor, dx: Tensor) -> None:
    """Add the parts of dk or dv, in their order."""
    dx.copy_(parts.unflatten(1, (dx.shape[1], -1)).sum(2))
