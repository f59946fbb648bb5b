"""Tensors, kernel arguments and the preprocessing launch that the fused and the split backward pass share."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call, Needs, Tensors, new_rows
from ....call.device import describe_device
from ...epilogue import RowStats, requested_from_rows
from ...gpu.kernel import Kernel
from ...gpu.pairs import with_contiguous_keys
from ...gpu.pointers import Described, Layout, Pointers
from ...gpu.replay import Recorder
from ...scalars import (
    LOG2E,
    dlse_strides,
    head_strides,
    head_terms,
    lse_strides,
    rows_last,
    strides,
    window_numbers,
)
from ..backward_config import DkdvConfig, FusedBackwardConfig
from ..tile_config import ALIGN, MMA_M, OVERLAPPING
from . import KERNELS, formulas
from .descriptors import dense_descriptor, ragged_descriptor, row_stats_descriptor
from .distance_table import with_distance_table
from .scheduler_args import max_blocks
from .steps import steps_of_blocks

WARPS = 4
# In `preprocess`, features of a warp: more are loaded one after another, as the compiler saves registers.
FEATURES, MOST_WARPS = 512, 16
PREPROCESS = Kernel(f"{KERNELS}.preprocess", "preprocess_kernel")


class Rows(NamedTuple):
    """Results of forward by rows, and the gradient of lse."""

    out: Tensor
    lse: Tensor
    residual: Tensor | None  # residual of lse
    dlse: Tensor | None


class BlockCounts(NamedTuple):
    """Numbers of blocks; upper bounds if packed."""

    heads: int  # query heads; dense: of all sequences
    m_blocks: int  # blocks of the row statistics of a head
    n_blocks: int  # blocks of keys of a key head; dense: of one sequence
    num_tiles: int  # blocks of keys of all key heads, times splits of their rows

    @classmethod
    def of(cls, config: FusedBackwardConfig | DkdvConfig, q: Tensor, k: Tensor, batch: int) -> "BlockCounts":
        if q.dim() == 4:
            m_blocks, n_blocks = -(-q.shape[2] // config.stats_rows), -(-k.shape[2] // config.block_n)
            return cls(batch * q.shape[1], m_blocks, n_blocks, batch * k.shape[1] * n_blocks * config.splits)
        m_blocks, n_blocks = (
            max_blocks(len(x), block, batch) for x, block in ((q, config.stats_rows), (k, config.block_n))
        )
        return cls(q.shape[1], m_blocks, n_blocks, k.shape[1] * n_blocks)


class BackwardLaunches:
    """Recorded launches of one backward pass. `config` is for the kernel of dk and dv."""

    def __init__(
        self, recorder: Recorder, config: FusedBackwardConfig | DkdvConfig, call: Call, t: Tensors, dout: Tensor
    ):
        self.follows_copy = False  # whether `preprocess` needs nothing of the launch before it
        self.recorder, self.config, self.tensors, self.dout = recorder, config, t, dout
        self.call = with_contiguous_keys(recorder, with_distance_table(recorder, call._replace(tensors=t)))
        self.q, self.k, self.v = (recorder.op(rows_last, x) for x in t[:3])
        self.head_terms = {symbol: recorder.contiguous(x) for symbol, x in head_terms(t).items()}
        self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k = (
            recorder.contiguous(x) for x in (t.cu_seqlens_q, t.cu_seqlens_k, t.seqused_k)
        )
        self.packed = self.cu_seqlens_q is not None
        self.make_descriptor = ragged_descriptor if self.packed else dense_descriptor
        self.batch = len(self.q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1
        self.seqlen_q, self.seqlen_k = (len(x) if self.packed else x.shape[2] for x in (self.q, self.k))
        self.blocks = BlockCounts.of(config, self.q, self.k, self.batch)
        self.group = self.q.shape[1] // self.k.shape[1] // config.head_splits  # query heads that a program visits
        self.cores = cores_of(self.q)
        self.programs = min(self.cores, self.blocks.num_tiles)
        self.padded_rows = self.blocks.m_blocks * config.stats_rows
        row_stats = (self.blocks.heads, self.padded_rows), torch.float32
        self.workspace = recorder.workspace(
            self.q,
            {"neg_lse": row_stats, "neg_delta": row_stats}
            | ({"neg_residual": row_stats} if formulas.is_natural(self.call) else {})
            | dict.fromkeys(("tile_count_semaphore", "tile_count_semaphore_2"), ((1,), torch.int32))
            | self.more_workspace(),
        )

    def more_workspace(self) -> dict[str, Layout]:
        """Names and layouts of tensors in the workspace that not both passes have."""
        return {}

    def launch(self, kernel: Any, pointers: Pointers, programs: int, scalars: dict[str, Any]) -> None:
        """Launch a kernel that recomputes scores."""
        formulas.launch(self.recorder, self.call, kernel, pointers, programs, scalars, partial=True)

    def row_kernel_scalars(self) -> dict[str, Any]:
        """Scalars of the kernels that run one program for each block of rows."""
        return {
            "num_tiles": self.blocks.m_blocks,
            "num_heads": self.q.shape[1],
            "seqlen_q": self.seqlen_q,
            "batch": self.batch,
        }

    def preprocess(self, rows: Rows, dq_accum: Tensor | None = None) -> None:
        """Launch the kernel for the row statistics, which also resets all semaphores and `dq_accum`."""
        scalars = {
            **self.row_kernel_scalars(),
            **strides("out", rows.out, ALIGN),
            **strides("dout", self.dout, ALIGN),
            **lse_strides(rows.lse),
            **dlse_strides(rows.dlse),
            "columns": self.config.head_dim_v.columns_of(rows.out),
            "dq_parts": self.config.dq_parts,
            "HEAD_DIM": self.config.head_dim_v,
            "ALIGN": ALIGN,
            "BLOCK_M": self.config.stats_rows,
            "num_warps": min(MOST_WARPS, self.config.stats_rows * max(self.config.head_dim_v.chunks) // FEATURES),
            **(OVERLAPPING if self.follows_copy else {}),
        }
        pointers = {
            **rows._asdict(), "dout": self.dout,
            "cu_seqlens_q": self.cu_seqlens_q, "dq_semaphore": None, "tile_count_semaphore_3": None,
            **self.workspace, **self.residual_pointer(), "dq_accum": dq_accum,
        }  # fmt: skip
        self.recorder.launch(PREPROCESS, pointers, self.blocks.heads * self.blocks.m_blocks, scalars)

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v and dout as the kernels read them."""
        return self.q, self.k, self.v, self.dout

    def input_pointers(self, rows: int, keys: int = MMA_M) -> Pointers:
        """Descriptors of the inputs in boxes of rows and keys, pointers, and the tile scheduler's semaphore."""
        q, k, v, dout = self.inputs()
        box, box_v = (x.box for x in (self.config.head_dim, self.config.head_dim_v))
        return {
            "q_desc": Described(q, self.make_descriptor, (rows, box)),
            "k_desc": Described(k, self.make_descriptor, (keys, box)),
            "v_desc": Described(v, self.make_descriptor, (keys, box_v)),
            "dout_desc": Described(dout, self.make_descriptor, (rows, box_v)),
            "tile_count_semaphore": self.workspace["tile_count_semaphore"],
            **self.head_terms,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_k": self.seqused_k,
        }

    def residual_pointer(self) -> dict[str, Tensor | None]:
        """The pointer to the row statistic that natural scores have."""
        return {"neg_residual": self.workspace.get("neg_residual")}

    def row_stats_pointers(self, rows: int) -> Pointers:
        """TMA descriptors of the row statistics in boxes of rows, and that pointer."""
        descriptors = {
            f"{name}_desc": Described(self.workspace[name], row_stats_descriptor, rows)
            for name in ("neg_lse", "neg_delta")
        }
        return {**descriptors, **self.residual_pointer()}

    def new_dk_dv(self) -> tuple[Tensor, Tensor]:
        """Buffers for dk and dv."""
        return self.new_key_gradient(self.tensors.k), self.new_key_gradient(self.tensors.v)

    def new_key_gradient(self, x: Tensor) -> Tensor:
        """Buffer for dk or dv. With `seqused_k` it is zeroed: the kernels write no gradients of unused keys."""
        if self.seqused_k is None:
            return self.recorder.new(new_rows(x, x.shape[1], x.shape[-1], x.dtype))
        return self.recorder.op(partial(torch.zeros_like, memory_format=torch.contiguous_format), x)

    def new_dq(self) -> Tensor:
        """Buffer for dq."""
        q = self.tensors.q
        return self.recorder.new(new_rows(q, q.shape[1], q.shape[-1], q.dtype))

    def common_scalars(self) -> dict[str, Any]:
        """Scalars of all kernels that compute gradients."""
        return {
            **formulas.units(self.call),
            **window_numbers(self.call),
            "group": self.q.shape[1] // self.k.shape[1],
            "padded_rows": self.padded_rows,
            **head_strides(self.tensors, absent=0),
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "scale": self.call.settings.scale,
            "num_warps": WARPS,
        }

    def key_kernel_scalars(self) -> dict[str, Any]:
        """Scalars of the kernel for dk and dv."""
        heads_k = self.k.shape[1]
        return {
            **self.common_scalars(),
            "group": self.group,
            "num_tiles": self.blocks.num_tiles,
            "num_blocks": self.blocks.n_blocks,
            "total_heads": self.heads,
            "l2_swizzle": 0 if self.packed else min(self.config.heads_at_once, self.heads),
            "num_heads_k": heads_k,
        }

    @property
    def heads(self) -> int:
        """Key heads of all sequences of a dense call, or parts of their groups."""
        return self.blocks.heads // self.group

    def steps_of_blocks(self) -> list[int]:
        """Blocks of rows that each block of keys of a head of a dense call visits."""
        sizes = self.config.block_m, self.config.block_n
        return steps_of_blocks(self.call.settings, self.seqlen_q, self.seqlen_k, *sizes)

    def gradients_of_terms(self, needs: Needs) -> dict[str, Tensor]:
        """Requested gradients of score terms, by name."""
        return {}

    def gradients_from_rows(self, needs: Needs, rows: Rows) -> dict[str, Tensor]:
        """Requested gradients that follow from row statistics, by name; call after `preprocess`."""
        of_kernels = (self.workspace["neg_lse"], self.workspace.get("neg_residual"), self.workspace["neg_delta"])
        stats = (self.tensors.sinks, *of_kernels, rows.lse, rows.dlse)
        return {
            name: self.recorder.op(partial(from_row_stats, gradient, self.q.shape[1]), *stats)
            for name, gradient in requested_from_rows(needs, self.tensors)
        }


def cores_of(x: Tensor) -> int:
    """Multiprocessors of a tensor's device."""
    return describe_device(x.device).cores


def from_row_stats(
    gradient: Callable[[RowStats], Tensor],
    num_heads: int,
    sinks: Tensor | None,
    neg_lse: Tensor,
    neg_residual: Tensor | None,
    neg_delta: Tensor,
    out_lse: Tensor,
    dlse: Tensor | None,
) -> Tensor:
    """A gradient from the kernels' row statistics, to which padding contributes 0."""

    def by_heads(x: Tensor) -> Tensor:
        return x.view(-1, num_heads, x.shape[-1])

    lse = by_heads(neg_lse / -LOG2E if neg_residual is None else -neg_lse)
    residual = None if neg_residual is None else by_heads(neg_residual / -LOG2E)
    return gradient(RowStats(sinks, lse, by_heads(-neg_delta), out_lse, dlse, residual))
