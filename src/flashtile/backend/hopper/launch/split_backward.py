"""Launches of the split backward pass for head dimensions over 128: one kernel for dq, one for dk and dv. Over 256
these have a kernel each.

The second one is the dependent of the first: its programs begin where the first one's are done, so that the cores
that the last wave of the first leaves idle have work. Its blocks are half as long, and leave fewer idle at its own end.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Needs, Tensors
from ...gpu.kernel import Kernel
from ...gpu.pointers import Layout
from ...gpu.replay import Recorder, Results
from ...scalars import strides
from ..backward_config import DkdvConfig, SplitBackwardConfig
from ..tile_config import ALIGN, MMA_M, OVERLAPPING
from . import KERNELS
from .backward_launches import BackwardLaunches, Rows
from .scheduler_args import scheduler_args

DKDV = Kernel(f"{KERNELS}.dkdv.dkdv", "dkdv_kernel")
DQ = Kernel(f"{KERNELS}.dq.dq", "dq_kernel")
WIDE_DKDV = Kernel(f"{KERNELS}.wide.dkdv", "wide_dkdv_kernel")


class SplitBackward(BackwardLaunches):
    """The split backward pass: preprocess, dq, dkdv."""

    def __init__(self, recorder: Recorder, config: SplitBackwardConfig, call: Call, t: Tensors, dout: Tensor):
        self.dq_config, self.dkdv_config, self.dv_config = config.dq, config.dkdv, config.dv
        super().__init__(recorder, config.dkdv, call, t, dout)

    def more_workspace(self) -> dict[str, Layout]:
        return {} if self.dv_config is None else {"tile_count_semaphore_3": ((1,), torch.int32)}

    def run(self, rows: Rows, needs: Needs) -> Results:
        """Launch the kernels whose gradients are needed; returns dq, dk and dv."""
        self.preprocess(rows)
        # Nothing else may be launched between the two kernels, such as zeros for dk.
        dk, dv = self.new_dk_dv() if needs.k or needs.v else (None, None)
        dq = self.launch_dq() if needs.q else None
        if dk is not None and dv is not None:
            self.launch_dkdv(dk, dv, needs)
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

    def launch_dkdv(self, dk: Tensor, dv: Tensor, needs: Needs) -> None:
        """Launch the kernel for dk and dv, or a kernel for each that is needed. The first one overlaps that for dq."""
        overlapping = OVERLAPPING if needs.q else {}
        columns = self.config.head_dim.columns_of(self.k)
        columns_v = self.config.head_dim_v.columns_of(self.v)
        if self.dv_config is None:
            both = {"columns": columns, "columns_v": columns_v, **overlapping}
            self.launch_keys(DKDV, self.dkdv_config, {"dk": dk, "dv": dv}, both)
            return
        if needs.k:
            self.launch_keys(WIDE_DKDV, self.dkdv_config, {"dx": dk}, {"columns": columns, **overlapping})
        if needs.v:
            semaphore = {"tile_count_semaphore": self.workspace["tile_count_semaphore_3"]}
            options = {"columns": columns_v, "scale": 1.0, **({} if needs.k else overlapping)}
            self.launch_keys(WIDE_DKDV, self.dv_config, {"dx": dv}, options, semaphore)

    def launch_keys(
        self,
        kernel: Kernel,
        config: DkdvConfig,
        results: dict[str, Tensor],
        options: dict[str, Any],
        pointers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Launch a kernel for gradients of keys, which are by their names in it."""
        split = config.head_splits > 1
        stored = {name: self.new_parts(dx) if split else dx for name, dx in results.items()}
        scalars = {
            **self.key_kernel_scalars(),
            "head_splits": config.head_splits if split else None,
            "CONFIG": config.compiled,
            **options,
        }
        for name, dx in stored.items():
            scalars |= strides(name, dx, ALIGN)
        all_pointers = {
            **self.input_pointers(config.block_m), **self.row_stats_pointers(config.block_m), **stored, **pointers,
        }  # fmt: skip
        self.launch(kernel, all_pointers, self.programs, scalars)
        if split:
            for name, dx in results.items():
                self.recorder.effect(add_parts, stored[name], dx)

    def new_parts(self, dx: Tensor) -> Tensor:
        """Buffer for dk or dv of each part of a group of query heads, `[B, Hk * parts, Sk, D]` in fp32."""
        batch, heads, seqlen_k, width = dx.shape
        shape = batch, heads * self.config.head_splits, seqlen_k, width
        return self.recorder.new(dx.new_empty(shape, dtype=torch.float32))


def add_parts(parts: Tensor, dx: Tensor) -> None:
    """Add the parts of dk or dv, in their order."""
    dx.copy_(parts.unflatten(1, (dx.shape[1], -1)).sum(2))
