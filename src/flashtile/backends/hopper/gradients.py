"""The launches of one backward pass: numbers of rows first, then the kernel, then dq of the sums that it leaves."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs, Tensors, memory_of, new_rows
from ...device import describe_device
from ...plan import Plan
from ..common import passes
from ..common.arguments import (
    LOG2E,
    dlse_strides,
    lse_strides,
    rows_last,
    score_units,
    slopes_stride,
    strides,
    window_numbers,
)
from ..common.gradients import sink_gradient
from ..common.passes import Recorder, Results
from ..common.pointers import Described
from .backward import backward_kernel
from .counters import counter
from .descriptors import boxes, copyable, numbers_of_rows, packed_boxes, sums
from .rows import finish_kernel, prepare_kernel
from .tables import ROWS, BackwardLaunch, most_blocks

ALIGN = 8  # elements: what copyable tensors' strides are multiples of
SECTION_BYTES = 24 * 2**20  # rows and sums that the L2 cache keeps
WARPS = 4


def backward(
    plan: Plan, call: Call, needs: Needs, out: Tensor, lse: Tensor, dout: Tensor | None, dlse: Tensor | None
) -> Gradients:
    results, tile = (out, lse, dout, dlse), plan.tile.backward
    key = ("hopper backward", tile, needs, call.signature(), *map(memory_of, results))
    dq, dk, dv, dsinks = passes.run(key, (*call.tensors[:-1], *results), record_backward, tile, call, needs)
    return Gradients(q=dq, k=dk, v=dv, sinks=dsinks)


def record_backward(recorder: Recorder, tile: BackwardLaunch, call: Call, needs: Needs) -> Results:
    *given, out, lse, dout, dlse = recorder.given
    assert out is not None
    assert lse is not None
    out, lse = recorder.computed(copyable, out), recorder.computed(Tensor.contiguous, lse)
    dout = recorder.computed(torch.zeros_like, out) if dout is None else recorder.computed(copyable, dout)
    pass_ = BackwardPass(recorder, tile, call, Tensors(*given), dout)  # type: ignore[arg-type]
    pass_.prepare(out, lse, dlse)
    dk, dv = pass_.run()
    dq = pass_.finish()
    dsinks = pass_.sink_gradient() if needs.sinks else None
    return dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, dsinks


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
        rows, keys = (most_blocks(len(x), block, sequences) for x, block in ((q, tile.block_m), (k, tile.block_n)))
        return cls(q.shape[1], rows, keys, k.shape[1] * keys)


class BackwardPass:
    """What the launches of one backward pass have in common. Each head has `padded_rows` rows."""

    def __init__(self, recorder: Recorder, tile: BackwardLaunch, call: Call, t: Tensors, dout: Tensor):
        self.recorder, self.tile, self.call, self.dout = recorder, tile, call, dout
        self.q, self.k, self.v = (recorder.computed(rows_last, x) for x in t[:3])
        self.width = self.q.shape[-1]
        self.sinks, self.slopes = t.sinks, recorder.contiguous(t.alibi_slopes)
        self.cu_seqlens_q, self.cu_seqlens_k, self.seqused_k = (
            recorder.contiguous(x) for x in (t.cu_seqlens_q, t.cu_seqlens_k, t.seqused_k)
        )
        self.packed = self.cu_seqlens_q is not None
        self.batch = len(self.q) if self.cu_seqlens_q is None else len(self.cu_seqlens_q) - 1
        self.seqlen_q, self.seqlen_k = (len(x) if self.packed else x.shape[2] for x in (self.q, self.k))
        self.extent = Extent.of(tile, self.q, self.k, self.batch)
        self.programs = min(describe_device(self.q.device).cores, self.extent.tiles)
        self.padded_rows = self.extent.row_blocks * tile.block_m
        self.start, self.delta = (self.empty(self.extent.heads, self.padded_rows) for _ in range(2))
        self.turns = self.empty(self.extent.heads * self.extent.row_blocks, dtype=torch.int32)
        self.sums = self.empty(self.extent.heads * self.padded_rows, self.width)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.recorder.new(self.q.new_empty(shape, dtype=dtype))

    def common(self) -> dict[str, Any]:
        return {
            "num_tiles": self.extent.row_blocks,
            "num_heads": self.q.shape[1],
            "seqlen_q": self.seqlen_q,
            "batch": self.batch,
        }

    def prepare(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        numbers = {
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
            "out": out, "dout": self.dout, "lse": lse, "dlse": dlse,
            "start": self.start, "delta": self.delta, "turns": self.turns, "cu_seqlens_q": self.cu_seqlens_q,
        }  # fmt: skip
        self.recorder.launch(prepare_kernel, pointers, self.extent.heads * self.extent.row_blocks, numbers)

    def run(self) -> tuple[Tensor, Tensor]:
        dk, dv = (self.of_keys(x) for x in (self.k, self.v))
        rows = self.tile.block_m
        described = packed_boxes if self.packed else boxes
        pointers = {
            "q_desc": Described(self.q, described, (rows, self.width)),
            "k_desc": Described(self.k, described, (ROWS, self.width)),
            "v_desc": Described(self.v, described, (ROWS, self.width)),
            "dout_desc": Described(self.dout, described, (rows, self.width)),
            "start_desc": Described(self.start, numbers_of_rows, rows),
            "delta_desc": Described(self.delta, numbers_of_rows, rows),
            "dq_desc": Described(self.sums, sums, ROWS),
            "dk_desc": Described(dk, described, (ROWS, self.width)),
            "dv_desc": Described(dv, described, (ROWS, self.width)),
            "counter": self.recorder.computed(partial(counter, self.q.device, self.packed)),
            "turns": self.turns,
            "slopes": self.slopes,
            "cu_seqlens_q": self.cu_seqlens_q,
            "cu_seqlens_k": self.cu_seqlens_k,
            "seqused_k": self.seqused_k,
        }
        self.recorder.launch(backward_kernel, pointers, *self.numbers())
        return dk, dv

    def of_keys(self, x: Tensor) -> Tensor:
        """dk or dv. The kernel writes no keys past those that are used."""
        if self.seqused_k is None:
            return self.recorder.new(new_rows(x, x.shape[1], x.shape[-1], x.dtype))
        return self.recorder.computed(partial(torch.zeros_like, memory_format=torch.contiguous_format), x)

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
            "stride_slopes_b": 0 if self.slopes is None else slopes_stride(self.slopes),
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
        dq = self.recorder.new(new_rows(self.q, self.q.shape[1], self.width, self.q.dtype))
        numbers = {
            **self.common(),
            **strides("dq", dq, ALIGN),
            "scale": self.call.settings.scale,
            "WIDTH": self.width,
            "ALIGN": ALIGN,
            "BLOCK_M": self.tile.block_m,
            "num_warps": WARPS,
        }
        pointers = {"sums": self.sums, "turns": self.turns, "dq": dq, "cu_seqlens_q": self.cu_seqlens_q}
        self.recorder.launch(finish_kernel, pointers, self.extent.heads * self.extent.row_blocks, numbers)
        return dq

    def sink_gradient(self) -> Tensor:
        gradient = partial(sinks_from_rows, self.q.shape[1])
        return self.recorder.computed(gradient, self.sinks, self.start, self.delta)


def sinks_from_rows(num_heads: int, sinks: Tensor, start: Tensor, delta: Tensor) -> Tensor:
    """dsinks, from the numbers of rows, of which those of padding add nothing."""
    lse, delta = (x.view(-1, num_heads, x.shape[-1]) for x in (start / -LOG2E, -delta))
    return sink_gradient(sinks, lse, delta)
