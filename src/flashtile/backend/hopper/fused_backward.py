"""Launches of the fused backward pass: one kernel that accumulates dq in memory, and the conversion of dq."""

from typing import Any

import torch
from torch import Tensor

from ...call.call import Call, Needs, Tensors
from ..gpu.kernel import Kernel
from ..gpu.pointers import Described
from ..gpu.replay import Recorder, Results
from ..scalars import strides
from .backward_launches import WARPS, BackwardLaunches
from .bias_tiles import backward_tiles
from .block_lists import key_lists
from .descriptors import dq_accum_descriptor
from .tables import ALIGN, COMBINE_ROWS, DQ_COLUMNS, MMA_M, NUM_WARPGROUPS, FusedBackwardConfig

BACKWARD = Kernel(f"{__package__}.kernels.backward.fused", "backward_kernel")
ADD_SPLITS = Kernel(f"{__package__}.kernels.add_splits", "add_splits_kernel")
POSTPROCESS = Kernel(f"{__package__}.kernels.postprocess", "postprocess_kernel")


class FusedBackward(BackwardLaunches):
    """The fused backward pass: preprocess, backward, postprocess."""

    config: FusedBackwardConfig

    def __init__(self, recorder: Recorder, config: FusedBackwardConfig, call: Call, t: Tensors, dout: Tensor):
        super().__init__(recorder, config, call, t, dout)
        parts, heads = config.dq_parts, self.blocks.heads
        self.dq_semaphore = self.empty(parts * heads * self.blocks.m_blocks, NUM_WARPGROUPS, dtype=torch.int32)
        self.dq_accum = self.empty(parts * heads * self.padded_rows, config.head_dim.width)

    def run(self, out: Tensor, lse: Tensor, dlse: Tensor | None, _: Needs) -> Results:
        """Launch all kernels; returns dq, dk and dv."""
        self.preprocess(out, lse, dlse, self.dq_semaphore)
        splits = self.config.row_splits > 1
        dk, dv = (self.new_splits(x) for x in (self.k, self.v)) if splits else self.new_dk_dv()
        box = (MMA_M, min(self.config.head_dim.box, DQ_COLUMNS) if splits else self.config.head_dim.box)
        pointers = {
            **self.input_pointers(),
            **self.row_stats_pointers(),
            "dq_accum_desc": Described(self.dq_accum, dq_accum_descriptor, (MMA_M, self.config.dq_box)),
            "dk_desc": Described(dk, self.make_descriptor, box),
            "dv_desc": Described(dv, self.make_descriptor, box),
            "dq_semaphore": self.dq_semaphore,
        }
        lists, list_scalars = key_lists(
            self.recorder, self.call, self.config.block_m, self.config.block_n, first_key_first=self.config.lpt
        )
        config, bias_pointers = backward_tiles(self.call, self.config)
        bytes_per_row = self.config.head_dim.width * (2 * self.q.element_size() + self.dq_accum.element_size())
        scalars = {
            **self.key_kernel_scalars(bytes_per_row),
            **list_scalars,
            "row_splits": self.config.row_splits if splits else None,
            "dq_parts": self.config.dq_parts if self.config.dq_parts > 1 else None,
            "CONFIG": config.compiled,
        }
        self.launch(BACKWARD, pointers | lists | bias_pointers, self.programs, scalars)
        if splits:
            dk, dv = (self.add_splits(x, dx) for x, dx in zip((dk, dv), self.new_dk_dv(), strict=True))
        return self.postprocess(), dk, dv

    def new_splits(self, x: Tensor) -> Tensor:
        """Buffer for dk or dv of each split of the rows, `[row_splits * B, Hk, Sk, D]` in fp32."""
        batch, heads, seqlen_k, _ = x.shape
        return self.empty(self.config.row_splits * batch, heads, seqlen_k, self.config.head_dim.width)

    def add_splits(self, splits: Tensor, dx: Tensor) -> Tensor:
        """Launch the sum over the splits; returns `dx`."""
        batch, heads, seqlen_k, _ = dx.shape
        num_tiles = -(-seqlen_k // COMBINE_ROWS)
        scalars: dict[str, Any] = {
            **strides("dx", dx, ALIGN),
            "num_tiles": num_tiles,
            "num_heads": heads,
            "seqlen": seqlen_k,
            "columns": self.config.head_dim.columns_of(dx),
            "row_splits": self.config.row_splits,
            "HEAD_DIM": self.config.head_dim,
            "ALIGN": ALIGN,
            "BLOCK_N": COMBINE_ROWS,
            "num_warps": WARPS,
        }
        self.recorder.launch(ADD_SPLITS, {"splits": splits, "dx": dx}, num_tiles * batch * heads, scalars)
        return dx

    def postprocess(self) -> Tensor:
        """Launch the conversion of dq."""
        dq = self.new_dq()
        scalars: dict[str, Any] = {
            **self.row_kernel_scalars(),
            **strides("dq", dq, ALIGN),
            "scale": self.call.settings.scale,
            "columns": self.config.head_dim.columns_of(dq),
            "dq_parts": self.config.dq_parts,
            "HEAD_DIM": self.config.head_dim,
            "ALIGN": ALIGN,
            "BLOCK_M": self.config.block_m,
            "DQ_BOX": self.config.dq_box,
            "num_warps": WARPS,
        }
        pointers = {
            "dq_accum": self.dq_accum,
            "dq_semaphore": self.dq_semaphore,
            "dq": dq,
            "cu_seqlens_q": self.cu_seqlens_q,
        }
        self.recorder.launch(POSTPROCESS, pointers, self.blocks.heads * self.blocks.m_blocks, scalars)
        return dq
