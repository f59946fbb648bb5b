"""What the launches of one backward pass have in common: its tensors, and the numbers of rows that come first."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call.call import Call, Tensors, new_rows
from ...call.device import describe_device
from ..epilogue import sink_gradient
from ..gpu.pointers import Described, Pointers
from ..gpu.replay import Recorder
from ..scalars import (
    LOG2E,
    dlse_strides,
    lse_strides,
    rows_last,
    score_units,
    slopes_stride,
    strides,
    window_numbers,
)
from .descriptors import boxes, packed_boxes, row_stats
from .kernels.rows import prepare_kernel
from .semaphores import counter
from .tables import ALIGN, ROWS, BackwardLaunch, KeysLaunch, most_blocks

SECTION_BYTES = 24 * 2**20  # of rows and of what is added up for them, that the L2 cache keeps
WARPS = 4


class Extent(NamedTuple):
    """How many blocks there are; of packed sequences, how many there can be."""

    heads: int  # of queries, of all dense sequences
    row_blocks: int  # of each
    key_blocks: int  # of a key head of one dense sequence, or of all packed ones
    tiles: int  # blocks of keys of all heads

    @classmethod
    def of(cls, tile: BackwardLaunch | KeysLaunch, q: Tensor, k: Tensor, sequences: int) -> "Extent":
        if q.dim() == 4:
            rows, keys = -(-q.shape[2] // tile.block_m), -(-k.shape[2] // tile.block_n)
            return cls(sequences * q.shape[1], rows, keys, sequences * k.shape[1] * keys)
        rows, keys = (most_blocks(len(x), block, sequences) for x, block in ((q, tile.block_m), (k, tile.block_n)))
        return cls(q.shape[1], rows, keys, k.shape[1] * keys)


class BackwardPass:
    """One backward pass, whose dk and dv come from a kernel with this tile. Each head has `padded_rows` rows."""

    def __init__(self, recorder: Recorder, tile: BackwardLaunch | KeysLaunch, call: Call, t: Tensors, dout: Tensor):
        self.recorder, self.tile, self.call, self.tensors, self.dout = recorder, tile, call, t, dout
        self.q, self.k, self.v = (recorder.op(rows_last, x) for x in t[:3])
        self.sinks, self.slopes = t.sinks, recorder.contiguous(t.alibi_slopes)
        self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k = (
            recorder.contiguous(x) for x in (t.cu_seqlens_q, t.cu_seqlens_k, t.seqused_k)
        )
        self.packed = self.cu_seqlens_q is not None
        self.described = packed_boxes if self.packed else boxes
        self.batch = len(self.q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1
        self.seqlen_q, self.seqlen_k = (len(x) if self.packed else x.shape[2] for x in (self.q, self.k))
        self.extent = Extent.of(tile, self.q, self.k, self.batch)
        self.cores = describe_device(self.q.device).cores
        self.programs = min(self.cores, self.extent.tiles)
        self.padded_rows = self.extent.row_blocks * tile.block_m
        self.start, self.delta = (self.empty(self.extent.heads, self.padded_rows) for _ in range(2))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.recorder.new(self.q.new_empty(shape, dtype=dtype))

    def of_rows(self) -> dict[str, Any]:
        """Numbers for the kernels with a program for each block of rows."""
        return {
            "num_tiles": self.extent.row_blocks,
            "num_heads": self.q.shape[1],
            "seqlen_q": self.seqlen_q,
            "batch": self.batch,
        }

    def prepare(self, out: Tensor, lse: Tensor, dlse: Tensor | None, turns: Tensor | None) -> None:
        scalars = {
            **self.of_rows(),
            **strides("out", out, ALIGN),
            **strides("dout", self.dout, ALIGN),
            **lse_strides(lse),
            **dlse_strides(dlse),
            "HEAD_DIM": self.tile.head_dim_v,
            "ALIGN": ALIGN,
            "BLOCK_M": self.tile.block_m,
            "num_warps": WARPS,
        }
        pointers = {
            "out": out, "dout": self.dout, "lse": lse, "dlse": dlse,
            "start": self.start, "delta": self.delta, "turns": turns, "cu_seqlens_q": self.cu_seqlens_q,
        }  # fmt: skip
        self.recorder.launch(prepare_kernel, pointers, self.extent.heads * self.extent.row_blocks, scalars)

    def rows_and_keys(self) -> Pointers:
        """What passes by, for the copy engine, and what a kernel reads besides."""
        rows, (box, box_v) = self.tile.block_m, (x.box for x in (self.tile.head_dim, self.tile.head_dim_v))
        return {
            "q_desc": Described(self.q, self.described, (rows, box)),
            "k_desc": Described(self.k, self.described, (ROWS, box)),
            "v_desc": Described(self.v, self.described, (ROWS, box_v)),
            "dout_desc": Described(self.dout, self.described, (rows, box_v)),
            "counter": self.recorder.op(partial(counter, self.q.device, self.packed)),
            "slopes": self.slopes,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_k": self.seqused_k,
        }

    def described_numbers(self) -> Pointers:
        """The numbers of rows, for the copy engine."""
        return {
            "start_desc": Described(self.start, row_stats, self.tile.block_m),
            "delta_desc": Described(self.delta, row_stats, self.tile.block_m),
        }

    def results_of_keys(self) -> tuple[Tensor, Tensor]:
        """dk and dv."""
        return self.of_keys(self.tensors.k), self.of_keys(self.tensors.v)

    def of_keys(self, x: Tensor) -> Tensor:
        """dk or dv. The kernel writes no keys past those that are used."""
        if self.seqused_k is None:
            return self.recorder.new(new_rows(x, x.shape[1], x.shape[-1], x.dtype))
        return self.recorder.op(partial(torch.zeros_like, memory_format=torch.contiguous_format), x)

    def result_of_rows(self) -> Tensor:
        """dq."""
        q = self.tensors.q
        return self.recorder.new(new_rows(q, q.shape[1], q.shape[-1], q.dtype))

    def common_numbers(self) -> dict[str, Any]:
        """Of kernels that walk over rows or keys."""
        return {
            **score_units(self.call),
            **window_numbers(self.call),
            "group": self.q.shape[1] // self.k.shape[1],
            "padded_rows": self.padded_rows,
            "stride_slopes_b": 0 if self.slopes is None else slopes_stride(self.slopes),
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "scale": self.call.settings.scale,
            "num_warps": WARPS,
        }

    def numbers_of_keys(self, bytes_of_row: int) -> dict[str, Any]:
        """Of the kernel that computes dk and dv, whose rows take so much of the L2 cache."""
        heads_k = self.k.shape[1]
        return {
            **self.common_numbers(),
            "num_tiles": self.extent.tiles,
            "num_blocks": self.extent.key_blocks,
            "all_heads": self.batch * heads_k,
            "section": 0 if self.packed else self.section(bytes_of_row),
            "num_heads_k": heads_k,
            "TILE": self.tile,
        }

    def section(self, bytes_of_row: int) -> int:
        """Heads of keys that are worked on together. One section just fills the device, so that programs that wait for
        each other begin together; and where keys are seen by different numbers of rows, the L2 cache has to hold it.
        """
        at_once = max(1, self.programs // self.extent.key_blocks)
        if self.call.settings.window.unlimited:
            return at_once
        of_one = self.q.shape[1] // self.k.shape[1] * self.seqlen_q * bytes_of_row
        return max(1, min(at_once, SECTION_BYTES // of_one))

    def sink_gradient(self) -> Tensor:
        gradient = partial(sinks_from_rows, self.q.shape[1])
        return self.recorder.op(gradient, self.sinks, self.start, self.delta)


def sinks_from_rows(num_heads: int, sinks: Tensor, start: Tensor, delta: Tensor) -> Tensor:
    """dsinks, from the numbers of rows, of which those of padding add nothing."""
    lse, delta = (x.view(-1, num_heads, x.shape[-1]) for x in (start / -LOG2E, -delta))
    return sink_gradient(sinks, lse, delta)
