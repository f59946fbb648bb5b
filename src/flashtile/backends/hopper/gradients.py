"""The launches of one backward pass: numbers of rows first, then the kernel, then dq of the sums that it leaves."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs, memory_of, new_rows
from ...device import describe_device
from ...plan import Plan
from ..common.arguments import contiguous, dlse_strides, lse_strides, rows_last, score_units, strides, window_numbers
from ..common.gradients import sink_gradient
from ..common.launch import launch, on_device
from ..common.pointers import Described
from .backward import backward_kernel
from .counters import counter
from .descriptors import boxes, copyable, numbers_of_rows, packed_boxes, sums
from .rows import finish_kernel, prepare_kernel
from .tables import ROWS, BackwardLaunch

ALIGN = 8  # elements: what copyable tensors' strides are multiples of
SECTION_BYTES = 24 * 2**20  # rows and sums that the L2 cache keeps
WARPS = 4
LN2 = math.log(2)


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    out, lse = copyable(out), lse.contiguous()
    dout = torch.zeros_like(out) if dout is None else copyable(dout)
    pass_ = BackwardPass(plan.tile.backward, call, q, k, v, dout)
    with on_device(q):
        pass_.prepare(out, lse, dlse)
        dk, dv = pass_.run()
        dq = pass_.finish()
        dsinks = pass_.sink_gradient() if needs.sinks else None
    return Gradients(
        q=dq if needs.q else None, k=dk if needs.k else None, v=dv if needs.v else None, sinks=dsinks
    )  # fmt: skip


class Extent(NamedTuple):
    """How many blocks there are; of packed sequences, how many there can be."""

    heads: int  # of queries, of all dense sequences
    row_blocks: int  # of each
    key_blocks: int  # of a key head of one dense sequence, or of all packed ones
    tiles: int  # blocks of keys of all heads

    @classmethod
    def of(cls, tile: BackwardLaunch, q: Tensor, k: Tensor, sequences: int) -> "Extent":
        if q.dim() == 4:
            rows, keys = -(-q.shape[2] // tile.block_m), -(-k.shape[2] // tile.block_n)
            return cls(sequences * q.shape[1], rows, keys, sequences * k.shape[1] * keys)
        # A sequence more than there are has the tokens that belong to none; each begins with a block.
        rows, keys = (len(x) // block + sequences + 1 for x, block in ((q, tile.block_m), (k, tile.block_n)))
        return cls(q.shape[1], rows, keys, k.shape[1] * keys)


class BackwardPass:
    """What the launches of one backward pass have in common. Each head has `padded_rows` rows."""

    def __init__(self, tile: BackwardLaunch, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor):
        self.tile, self.call = tile, call
        self.signature = (tile, call.signature(), memory_of(dout))
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.width = q.shape[-1]
        t = call.tensors
        self.packed = t.cu_seqlens_q is not None
        self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k = (
            contiguous(x) for x in (t.cu_seqlens_q, t.cu_seqlens_k, t.seqused_k)
        )
        self.batch = len(q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1
        self.seqlen_q, self.seqlen_k = (len(x) if self.packed else x.shape[2] for x in (q, k))
        self.extent = Extent.of(tile, q, k, self.batch)
        self.padded_rows = self.extent.row_blocks * tile.block_m
        self.start, self.delta = q.new_empty((2, self.extent.heads, self.padded_rows), dtype=torch.float32)
        self.programs = min(describe_device(q.device).cores, self.extent.tiles)
        self.turns = q.new_zeros(self.extent.heads * self.extent.row_blocks, dtype=torch.int32)
        self.sums = q.new_empty((self.extent.heads * self.padded_rows, self.width), dtype=torch.float32)

    def common(self) -> dict[str, Any]:
        return {
            "num_tiles": self.extent.row_blocks,
            "num_heads": self.q.shape[1],
            "seqlen_q": self.seqlen_q,
            "batch": self.batch,
        }

    def run_launch(self, kernel: Any, pointers: dict[str, Any], numbers: Any, *given: Any) -> None:
        launch(kernel, (self.signature, *map(memory_of, given)), pointers, numbers)

    def prepare(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        def numbers() -> tuple[int, dict[str, Any]]:
            return self.extent.heads * self.extent.row_blocks, {
                **self.common(),
                **strides("out", out, ALIGN),
                **strides("dout", self.dout, ALIGN),
                **lse_strides(lse),
                **dlse_strides(dlse),
                "WIDTH": self.width,
                "ALIGN": ALIGN,
                "BLOCK_M": self.tile.block_m,
                "num_warps": WARPS,
            }

        pointers = {
            "out": out, "dout": self.dout, "lse": lse, "dlse": dlse, "start": self.start, "delta": self.delta,
            "cu_seqlens_q": self.cu_seqlens_q,
        }  # fmt: skip
        self.run_launch(prepare_kernel, pointers, numbers, out, dlse)

    def run(self) -> tuple[Tensor, Tensor]:
        dk, dv = (new_rows(x, x.shape[1], x.shape[-1], x.dtype) for x in (self.k, self.v))
        if self.seqused_k is not None:  # the kernel writes no others
            dk.zero_()
            dv.zero_()
        rows = self.tile.block_m
        described = packed_boxes if self.packed else boxes
        pointers = {
            "q_desc": Described(self.q, described, (rows,)),
            "k_desc": Described(self.k, described, (ROWS,)),
            "v_desc": Described(self.v, described, (ROWS,)),
            "dout_desc": Described(self.dout, described, (rows,)),
            "start_desc": Described(self.start, numbers_of_rows, (rows,)),
            "delta_desc": Described(self.delta, numbers_of_rows, (rows,)),
            "dq_desc": Described(self.sums, sums, (ROWS,)),
            "dk_desc": Described(dk, described, (ROWS,)),
            "dv_desc": Described(dv, described, (ROWS,)),
            "counter": counter(self.q.device, self.packed),
            "turns": self.turns,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_k": self.seqused_k,
        }
        self.run_launch(backward_kernel, pointers, self.numbers)
        return dk, dv

    def numbers(self) -> tuple[int, dict[str, Any]]:
        heads_k = self.k.shape[1]
        return self.programs, {
            **score_units(self.call),
            **window_numbers(self.call),
            "num_tiles": self.extent.tiles,
            "num_blocks": self.extent.key_blocks,
            "all_heads": self.batch * heads_k,
            "section": 0 if self.packed else self.section(),
            "num_heads_k": heads_k,
            "group": self.q.shape[1] // heads_k,
            "padded_rows": self.padded_rows,
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "scale": self.call.settings.scale,
            "TILE": self.tile,
            "num_warps": WARPS,
        }

    def section(self) -> int:
        """Heads of keys that are worked on together. One section just fills the device, so that programs that wait for
        each other begin together; and where keys are seen by different numbers of rows, the L2 cache has to hold it.
        """
        at_once = max(1, self.programs // self.extent.key_blocks)
        if self.call.settings.window.unlimited:
            return at_once
        of_one = self.q.shape[1] // self.k.shape[1] * self.seqlen_q * self.width * (2 * self.q.element_size() + 4)
        return max(1, min(at_once, SECTION_BYTES // of_one))

    def finish(self) -> Tensor:
        dq = new_rows(self.q, self.q.shape[1], self.width, self.q.dtype)

        def numbers() -> tuple[int, dict[str, Any]]:
            return self.extent.heads * self.extent.row_blocks, {
                **self.common(),
                **strides("dq", dq, ALIGN),
                "scale": self.call.settings.scale,
                "WIDTH": self.width,
                "ALIGN": ALIGN,
                "BLOCK_M": self.tile.block_m,
                "num_warps": WARPS,
            }

        pointers = {"sums": self.sums, "turns": self.turns, "dq": dq, "cu_seqlens_q": self.cu_seqlens_q}
        self.run_launch(finish_kernel, pointers, numbers)
        return dq

    def sink_gradient(self) -> Tensor:
        """From the numbers of rows, of which those of padding add nothing."""
        lse, delta = (x.view(-1, self.q.shape[1], self.padded_rows) for x in (self.start * -LN2, -self.delta))
        return sink_gradient(self.call, lse, delta)
