"""The launches of one backward pass: numbers of rows first, then the kernel, then dq of the sums that it leaves."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs, Tensors, memory_of, new_rows
from ...device import describe_device
from ...plan import Plan
from ..common import passes
from ..common.arguments import dlse_strides, lse_strides, rows_last, score_units, strides, window_numbers
from ..common.gradients import sink_gradient
from ..common.passes import Recorder, Results
from ..common.pointers import Described
from .backward import backward_kernel
from .counters import counter
from .descriptors import boxes, copyable, numbers_of_rows, sums
from .rows import finish_kernel, prepare_kernel
from .tables import ROWS, BackwardLaunch

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
    t = Tensors(*given)  # type: ignore[arg-type]
    q, k, v = (recorder.computed(rows_last, x) for x in t[:3])
    pass_ = BackwardPass(recorder, tile, call, q, k, v, dout)
    pass_.prepare(out, lse, dlse)
    dk, dv = pass_.run()
    dq = pass_.finish()
    dsinks = recorder.computed(sinks_from_rows, t.sinks, lse, pass_.delta) if needs.sinks else None
    return dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, dsinks


def sinks_from_rows(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsinks, from rows that are padded and whose delta is negative."""
    return sink_gradient(sinks, lse, -delta[:, : lse.shape[-1]].reshape(lse.shape))


class BackwardPass:
    """What the launches of one backward pass have in common. Each sequence and head has `padded_rows` rows."""

    def __init__(
        self, recorder: Recorder, tile: BackwardLaunch, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
    ):
        self.recorder, self.tile, self.call = recorder, tile, call
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.batch, self.num_heads, self.seqlen_q, self.width = q.shape
        self.num_tiles = -(-self.seqlen_q // tile.block_m)
        self.padded_rows = self.num_tiles * tile.block_m
        self.all_heads = self.batch * self.num_heads
        self.start, self.delta = (self.empty(self.all_heads, self.padded_rows) for _ in range(2))

        self.blocks = -(-k.shape[2] // tile.block_n)
        self.tiles = self.batch * k.shape[1] * self.blocks
        self.programs = min(describe_device(q.device).cores, self.tiles)
        self.turns = self.empty(self.all_heads * self.num_tiles, dtype=torch.int32)
        self.sums = self.empty(self.all_heads * self.padded_rows, self.width)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.recorder.new(self.q.new_empty(shape, dtype=dtype))

    def common(self) -> dict[str, Any]:
        return {"num_tiles": self.num_tiles, "num_heads": self.num_heads, "seqlen_q": self.seqlen_q}

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
            "start": self.start, "delta": self.delta, "turns": self.turns,
        }  # fmt: skip
        self.recorder.launch(prepare_kernel, pointers, self.num_tiles * self.all_heads, numbers)

    def run(self) -> tuple[Tensor, Tensor]:
        dk, dv = (self.recorder.new(new_rows(x, x.shape[1], x.shape[-1], x.dtype)) for x in (self.k, self.v))
        rows = self.tile.block_m
        pointers = {
            "q_desc": Described(self.q, boxes, rows),
            "k_desc": Described(self.k, boxes, ROWS),
            "v_desc": Described(self.v, boxes, ROWS),
            "dout_desc": Described(self.dout, boxes, rows),
            "start_desc": Described(self.start, numbers_of_rows, rows),
            "delta_desc": Described(self.delta, numbers_of_rows, rows),
            "dq_desc": Described(self.sums, sums, ROWS),
            "dk_desc": Described(dk, boxes, ROWS),
            "dv_desc": Described(dv, boxes, ROWS),
            "counter": self.recorder.computed(partial(counter, self.q.device, False)),
            "turns": self.turns,
        }
        self.recorder.launch(backward_kernel, pointers, *self.numbers())
        return dk, dv

    def numbers(self) -> tuple[int, dict[str, Any]]:
        heads_k = self.k.shape[1]
        return self.programs, {
            **score_units(self.call),
            **window_numbers(self.call),
            "num_tiles": self.tiles,
            "num_blocks": self.blocks,
            "all_heads": self.batch * heads_k,
            "section": self.section(),
            "num_heads_k": heads_k,
            "group": self.num_heads // heads_k,
            "padded_rows": self.padded_rows,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.k.shape[2],
            "scale": self.call.settings.scale,
            "TILE": self.tile,
            "num_warps": WARPS,
        }

    def section(self) -> int:
        """Heads of keys that are worked on together. One section just fills the device, so that programs that wait for
        each other begin together; and where keys are seen by different numbers of rows, the L2 cache has to hold it.
        """
        at_once = max(1, self.programs // self.blocks)
        if self.call.settings.window.unlimited:
            return at_once
        of_one = self.num_heads // self.k.shape[1] * self.seqlen_q * self.width * (2 * self.q.element_size() + 4)
        return max(1, min(at_once, SECTION_BYTES // of_one))

    def finish(self) -> Tensor:
        dq = self.recorder.new(new_rows(self.q, self.num_heads, self.width, self.q.dtype))
        numbers = {
            **self.common(),
            **strides("dq", dq, ALIGN),
            "scale": self.call.settings.scale,
            "WIDTH": self.width,
            "ALIGN": ALIGN,
            "BLOCK_M": self.tile.block_m,
            "num_warps": WARPS,
        }
        pointers = {"sums": self.sums, "turns": self.turns, "dq": dq}
        self.recorder.launch(finish_kernel, pointers, self.num_tiles * self.all_heads, numbers)
        return dq
