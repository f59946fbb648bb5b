"""Launches of the fused backward pass: one kernel that accumulates dq in memory, and the conversion of dq."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Needs, Tensors
from ...gpu.kernel import Kernel
from ...gpu.pointers import Described, Layout, Pointers
from ...gpu.replay import Recorder, Results
from ...scalars import strides
from ..backward_config import FusedBackwardConfig
from ..tile_config import ALIGN, COMBINE_ROWS, DQ_COLUMNS, MMA_M, NUM_WARPGROUPS, OVERLAPPING
from . import KERNELS
from .backward_launches import WARPS, BackwardLaunches, Rows
from .bias_tiles import BACKWARD_SHARE, backward_tiles, with_aligned_rows
from .block_lists import has_lists, key_lists, mask_states
from .descriptors import dq_accum_descriptor
from .last_wave import KeyRows, LastWave, last_wave
from .slope_gradient import add_slope_parts, new_zeros, slope_parts_shape

BACKWARD = Kernel(f"{KERNELS}.backward.fused", "backward_kernel")
ADD_SPLITS = Kernel(f"{KERNELS}.add_splits", "add_splits_kernel")
POSTPROCESS = Kernel(f"{KERNELS}.postprocess", "postprocess_kernel")
NO_WAVE: dict[str, Any] = {"first_tile": None, "first_head": None}
NO_CHUNK: dict[str, Any] = {"chunk_lo": None, "chunk_hi": None}


class FusedBackward(BackwardLaunches):
    """The fused backward pass: preprocess, backward, postprocess."""

    config: FusedBackwardConfig

    def __init__(
        self,
        recorder: Recorder,
        config: FusedBackwardConfig,
        call: Call,
        t: Tensors,
        dout: Tensor,
        states: Tensor | None,
    ):
        super().__init__(recorder, config, call, t, dout)
        copied = with_aligned_rows(recorder, self.call, self.config, BACKWARD_SHARE)
        self.call, self.follows_copy = copied, copied is not self.call
        self.mask_states = mask_states(recorder, self.call) if states is None else states
        self.slope_parts: Tensor | None = None

    @property
    def stores_dq(self) -> bool:
        """Whether a single block of keys visits all rows, so that dq needs no accumulator."""
        if self.packed or self.blocks.n_blocks != 1 or has_lists(self.call):
            return False
        return self.steps_of_blocks() == [self.blocks.m_blocks]

    def more_workspace(self) -> dict[str, Layout]:
        if self.stores_dq:
            return {}
        heads, width = self.config.dq_parts * self.blocks.heads, self.config.head_dim.width
        dq_accum: dict[str, Layout] = {"dq_accum": ((heads * self.padded_rows, width), torch.float32)}
        if self.config.late_dq is not None:
            return dq_accum
        return {"dq_semaphore": ((heads * self.blocks.m_blocks, NUM_WARPGROUPS), torch.int32)} | dq_accum

    def run(self, rows: Rows, needs: Needs) -> Results:
        """Launch all kernels; returns dq, dk and dv."""
        wave = self.last_wave(needs)
        sums = self.sums_of_wave(wave) if wave is not None else []
        self.preprocess(rows, self.workspace["dq_accum"] if self.config.late_dq is not None else None)
        if needs.alibi_slopes:
            shape = slope_parts_shape(self.config.splits * self.blocks.heads, self.blocks.n_blocks)
            self.slope_parts = self.recorder.op(partial(new_zeros, shape), self.q)
        splits, chunks = self.config.splits > 1, self.config.row_chunks > 1
        in_fp32 = splits or chunks
        dk, dv = (self.new_splits(x) for x in (self.k, self.v)) if in_fp32 else self.new_dk_dv()
        box = self.key_box(in_fp32)
        dq = self.new_dq()
        pointers = {
            **self.input_pointers(self.config.block_m),
            **self.row_stats_pointers(self.config.block_m),
            **self.dq_pointers(dq),
            "dk_desc": Described(dk, self.make_descriptor, box),
            "dv_desc": Described(dv, self.make_descriptor, box),
            "dslopes": self.slope_parts,
        }
        lists, list_scalars = key_lists(
            self.recorder, self.call, self.config.block_m, self.config.block_n, self.mask_states,
            first_key_first=self.config.lpt,
        )  # fmt: skip
        config, bias_pointers = backward_tiles(self.call, self.config.compiled)
        pointers |= lists | bias_pointers
        scalars = {
            **self.key_kernel_scalars(),
            **list_scalars,
            "head_splits": self.config.head_splits if splits else None,
            "row_splits": self.config.row_splits if splits and not self.config.adds_dkdv else None,
            "dq_parts": self.config.dq_parts if self.config.dq_parts > 1 and not self.stores_dq else None,
            "CONFIG": config,
            **OVERLAPPING,
        }
        if wave is not None:
            scalars["num_tiles"] = wave.first_tile
        for chunk_lo, chunk_hi in self.chunks() if chunks else [(None, None)]:
            chunk = {"chunk_lo": chunk_lo, "chunk_hi": chunk_hi}
            self.launch(BACKWARD, pointers, self.programs, scalars | NO_WAVE | chunk)
        if wave is not None:
            self.launch_last_wave(wave, pointers, scalars | NO_CHUNK, sums, dk, dv)
        if in_fp32:
            dk, dv = (self.add_splits(x, dx, self.key_rows) for x, dx in zip((dk, dv), self.new_dk_dv(), strict=True))
        if not self.stores_dq:
            self.postprocess(dq)
        return dq, dk, dv

    def last_wave(self, needs: Needs) -> LastWave | None:
        """The last wave of blocks of keys, if more programs than one share each of them: in dense calls whose blocks
        take equally long, and whose sums may come in any order.
        """
        config = self.config
        if config.last_splits == 1 or needs.alibi_slopes or self.seqused_k is not None:
            return None
        return last_wave(self.heads, self.blocks.n_blocks, config.heads_at_once, config.last_splits, self.cores)

    def sums_of_wave(self, wave: LastWave) -> list[Tensor]:
        """Zeros to which the last wave adds dk and dv."""
        rows = wave.rows(self.config.block_n, self.seqlen_k)
        shape = 1, rows.heads, rows.seqlen, self.config.head_dim.width
        return [self.recorder.op(partial(new_zeros, shape), x) for x in (self.k, self.v)]

    def launch_last_wave(
        self, wave: LastWave, pointers: Pointers, scalars: dict[str, Any], sums: list[Tensor], dk: Tensor, dv: Tensor
    ) -> None:
        """Launch the last wave, whose programs add to dk and dv in fp32, and the conversion of these."""
        rows = wave.rows(self.config.block_n, self.seqlen_k)
        box = self.key_box(True)
        descs = {
            f"{name}_desc": Described(x, self.make_descriptor, box) for name, x in zip(("dk", "dv"), sums, strict=True)
        }
        of_wave = {
            "num_tiles": wave.num_tiles * wave.splits,
            "row_splits": wave.splits,
            "first_tile": wave.first_tile,
            "first_head": wave.first_head,
        }
        programs = min(self.cores, wave.num_tiles * wave.splits)
        semaphore = {"tile_count_semaphore": self.workspace["tile_count_semaphore_2"]}
        self.launch(BACKWARD, {**pointers, **descs, **semaphore}, programs, scalars | of_wave)
        for x, dx in zip(sums, (dk, dv), strict=True):
            self.add_splits(x, dx, rows)

    def dq_pointers(self, dq: Tensor) -> Pointers:
        """dq itself, if the kernel stores it; else its accumulators, with semaphores unless sums begin with zeros."""
        absent: Pointers = dict.fromkeys(("dq_desc", "dq_accum_desc", "dq_accum", "dq_semaphore"))
        box = MMA_M, self.config.dq_box
        if self.stores_dq:
            return absent | {"dq_desc": Described(dq, self.make_descriptor, box)}
        dq_accum = self.workspace["dq_accum"]
        if self.config.late_dq is not None:
            return absent | {"dq_accum": dq_accum}
        dq_accum_desc = Described(dq_accum, dq_accum_descriptor, box)
        return absent | {"dq_accum_desc": dq_accum_desc, "dq_semaphore": self.workspace["dq_semaphore"]}

    def gradients_of_terms(self, needs: Needs) -> dict[str, Tensor]:
        """The requested gradient of ALiBi slopes."""
        if not needs.alibi_slopes:
            return {}
        add = partial(add_slope_parts, self.batch, self.config.block_n)
        return {"alibi_slopes": self.recorder.op(add, self.tensors.alibi_slopes, self.slope_parts, self.cu_seqlens_k)}

    def new_splits(self, x: Tensor) -> Tensor:
        """Buffer for parts of dk or dv, `[parts * B, Hk, Sk, D]` in fp32; zeros if programs or launches add to it."""
        batch, heads, seqlen_k, _ = x.shape
        shape = self.config.dkdv_parts * batch, heads, seqlen_k, self.config.head_dim.width
        if self.config.row_chunks > 1 or self.config.adds_dkdv:
            return self.recorder.op(partial(new_zeros, shape), x)
        return self.recorder.new(self.q.new_empty(shape, dtype=torch.float32))

    def key_box(self, in_fp32: bool) -> tuple[int, int]:
        """Rows and columns of a box of dk and dv, which may lie where ds of a block does."""
        columns = self.config.head_dim.box
        if self.config.stores_through_ds:
            return MMA_M, min(columns, DQ_COLUMNS // 2 if in_fp32 else DQ_COLUMNS)
        return MMA_M, min(columns, DQ_COLUMNS) if in_fp32 else columns

    def chunks(self) -> list[tuple[int, int]]:
        """The blocks of rows of each chunk."""
        count, blocks = self.config.row_chunks, self.blocks.m_blocks
        return [(blocks * n // count, blocks * (n + 1) // count) for n in range(count)]

    @property
    def key_rows(self) -> KeyRows:
        """All rows of dk and dv."""
        return KeyRows(0, self.batch * self.k.shape[1], self.seqlen_k)

    def add_splits(self, splits: Tensor, dx: Tensor, rows: KeyRows) -> Tensor:
        """Launch the sum over the splits of some rows of `dx`; returns it."""
        num_tiles = -(-rows.seqlen // COMBINE_ROWS)
        scalars: dict[str, Any] = {
            **strides("dx", dx, ALIGN),
            "num_tiles": num_tiles,
            "num_heads": dx.shape[1],
            "first_head": rows.first_head,
            "seqlen": rows.seqlen,
            "columns": self.config.head_dim.columns_of(dx),
            "num_splits": self.config.dkdv_parts,
            "HEAD_DIM": self.config.head_dim,
            "ALIGN": ALIGN,
            "BLOCK_N": COMBINE_ROWS,
            "num_warps": WARPS,
            **OVERLAPPING,
        }
        self.recorder.launch(ADD_SPLITS, {"splits": splits, "dx": dx}, num_tiles * rows.heads, scalars)
        return dx

    def postprocess(self, dq: Tensor) -> None:
        """Launch the conversion of dq."""
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
            "DQ_SHARE": self.config.dq_shares[0].width,
            "num_warps": WARPS,
            **OVERLAPPING,
        }
        pointers = {
            "dq_accum": self.workspace["dq_accum"],
            "dq_semaphore": None if self.config.late_dq is not None else self.workspace["dq_semaphore"],
            "dq": dq,
            "cu_seqlens_q": self.cu_seqlens_q,
        }
        self.recorder.launch(POSTPROCESS, pointers, self.blocks.heads * self.blocks.m_blocks, scalars)
