"""The launches of one backward pass: numbers of rows first, then the kernel, then dq of the sums that it leaves."""

from typing import Any

import torch
from torch import Tensor

from ...call import Call, Gradients, Needs, memory_of, new_rows
from ...device import describe_device
from ...plan import Plan
from ..common.arguments import dlse_strides, lse_strides, rows_last, score_units, strides, window_numbers
from ..common.gradients import sink_gradient
from ..common.launch import launch, on_device
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
    q, k, v = (rows_last(x) for x in call.tensors[:3])
    out, lse = copyable(out), lse.contiguous()
    dout = torch.zeros_like(out) if dout is None else copyable(dout)
    pass_ = BackwardPass(plan.tile.backward, call, q, k, v, dout)
    with on_device(q):
        pass_.prepare(out, lse, dlse)
        dk, dv = pass_.run()
        dq = pass_.finish()
        dsinks = sink_gradient(call, lse, -pass_.delta[:, : q.shape[2]].reshape(lse.shape)) if needs.sinks else None
    return Gradients(
        q=dq if needs.q else None, k=dk if needs.k else None, v=dv if needs.v else None, sinks=dsinks
    )  # fmt: skip


class BackwardPass:
    """What the launches of one backward pass have in common. Each sequence and head has `padded_rows` rows."""

    def __init__(self, tile: BackwardLaunch, call: Call, q: Tensor, k: Tensor, v: Tensor, dout: Tensor):
        self.tile, self.call = tile, call
        self.signature = (tile, call.signature(), memory_of(dout))
        self.q, self.k, self.v, self.dout = q, k, v, dout
        self.batch, self.num_heads, self.seqlen_q, self.width = q.shape
        self.num_tiles = -(-self.seqlen_q // tile.block_m)
        self.padded_rows = self.num_tiles * tile.block_m
        self.all_heads = self.batch * self.num_heads
        self.start, self.delta = q.new_empty((2, self.all_heads, self.padded_rows), dtype=torch.float32)

        self.blocks = -(-k.shape[2] // tile.block_n)
        self.tiles = self.batch * k.shape[1] * self.blocks
        self.programs = min(describe_device(q.device).cores, self.tiles)
        self.turns = q.new_zeros(self.all_heads * self.num_tiles, dtype=torch.int32)
        self.sums = q.new_empty((self.all_heads * self.padded_rows, self.width), dtype=torch.float32)

    def common(self) -> dict[str, Any]:
        return {"num_tiles": self.num_tiles, "num_heads": self.num_heads, "seqlen_q": self.seqlen_q}

    def run_launch(self, kernel: Any, pointers: dict[str, Any], numbers: Any, *given: Any) -> None:
        launch(kernel, (self.signature, *map(memory_of, given)), pointers, numbers)

    def prepare(self, out: Tensor, lse: Tensor, dlse: Tensor | None) -> None:
        def numbers() -> tuple[int, dict[str, Any]]:
            return self.num_tiles * self.all_heads, {
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
            "out": out, "dout": self.dout, "lse": lse, "dlse": dlse, "start": self.start, "delta": self.delta
        }  # fmt: skip
        self.run_launch(prepare_kernel, pointers, numbers, out, dlse)

    def run(self) -> tuple[Tensor, Tensor]:
        dk, dv = (new_rows(x, x.shape[1], x.shape[-1], x.dtype) for x in (self.k, self.v))
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
            "counter": counter(self.q.device, False),
            "turns": self.turns,
        }
        self.run_launch(backward_kernel, pointers, self.numbers)
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
        dq = new_rows(self.q, self.num_heads, self.width, self.q.dtype)

        def numbers() -> tuple[int, dict[str, Any]]:
            return self.num_tiles * self.all_heads, {
                **self.common(),
                **strides("dq", dq, ALIGN),
                "scale": self.call.settings.scale,
                "WIDTH": self.width,
                "ALIGN": ALIGN,
                "BLOCK_M": self.tile.block_m,
                "num_warps": WARPS,
            }

        self.run_launch(finish_kernel, {"sums": self.sums, "turns": self.turns, "dq": dq}, numbers)
        return dq
