"""The launches of a second derivative of wide heads, behind forward: row statistics, then weights of pairs and their
products for one range of heads and rows after another (`kernels.second_weights`).
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Needs, Tangents, lse_shape, new_rows
from ....call.device import describe_device
from ....call.plan import Plan
from ....call.problem import power_of_two
from ...epilogue import sink_tangents
from ...gpu.kernel import Kernel
from ...gpu.pairs import with_contiguous_keys
from ...gpu.pointers import Pointers
from ...gpu.replay import Recorder
from ...replays import Results, with_inputs
from ...scalars import keep_scale, rows_last, strides, threshold
from ..plan.tables import SPLITS
from ..tile_config import BlockedSecond, KernelConfig
from . import KERNELS
from . import arguments as args
from .backward_launches import BackwardLaunches, Rows
from .gradients import lse_of, no_gradient, residual_of
from .second import NO_FEATURES, STILL, row_products, sink_gradient
from .semaphores import new_semaphores
from .tangents import absent, constants

WEIGHTS, COMPLETE = (
    Kernel(f"{KERNELS}.second_weights", f"{name}_kernel") for name in ("second_weights", "complete_weights")
)
OF_KEYS, OF_ROWS = (Kernel(f"{KERNELS}.second_products", f"weighted_{name}_kernel") for name in ("keys", "rows"))
MOST_BYTES = 2**28  # weights in memory, unless one unit of rows takes more; sums of tiles are 5% more
WEIGHTS_OF_PAIR = 4
# The arguments of `second_weights.Visibility`.
ADDRESSES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table", "leftpad_k", "seed")
VISIBILITY = (
    "stride_page_table_b", "num_tiles", "batch", "num_heads_q", "num_heads_k", "total_q", "total_k", "max_seqlen_k",
    "pair_rows", "num_pages", "window_left", "window_right", "top_left", "attention_chunk", "chunk_origin",
    "diagonal", "i0", "j0", "b0", "h0", "num_heads", "threshold", "keep_scale",
)  # fmt: skip
COMPLETED = {"BLOCK_M": 8, "WIDTH": 512, "TILES": 32, "num_warps": 4}


Operands = tuple[Tensor | None, Tensor | None]  # weights of pairs, and rows or keys; the latter may be absent


class HeadRange(NamedTuple):
    """Query heads of all sequences, and their rows, whose weights are in memory together."""

    head: int
    num_heads: int
    row: int
    num_rows: int  # whole units


def ranges_of(heads: int, group: int, rows: int, pitch: int, unit: int, pairs: int) -> list[HeadRange]:
    """The ranges of a call, of at most so many pairs, or of one unit of rows. Heads that share keys are in one range,
    or a divisor of their number is in each.
    """
    units = -(-rows // unit)
    at_once = min(units, max(1, pairs // (unit * pitch)))
    most = max(1, pairs // (units * unit * pitch)) if at_once == units else 1
    together = most // group * group or max(n for n in range(1, min(most, group) + 1) if group % n == 0)
    return [
        HeadRange(head, min(together, heads - head), unit * n, unit * min(at_once, units - n))
        for head in range(0, heads, together)
        for n in range(0, units, at_once)
    ]


def splits_of_sums(sums: int, programs: int) -> int:
    """How many programs share the keys of each sum."""
    return max(n for n in SPLITS if n == 1 or n * sums <= programs)


def launch_second_blocks(recorder: Recorder, plan: Plan, call: Call, moves: Needs, needs: Needs) -> Results:
    """As `second.launch_second`, for dense calls, from the results of forward."""
    call, along = with_inputs(call, moves, recorder.inputs)
    out, row_stats, dout, dlse = recorder.inputs[-4:]
    assert out is not None
    assert row_stats is not None
    dout = recorder.op(no_gradient, out) if dout is None else recorder.op(rows_last, dout)
    launches = BackwardLaunches(recorder, with_contiguous_keys(recorder, call), dout, None)
    residual = recorder.op(residual_of, row_stats) if call.keeps_residual else None
    rows = Rows(out, recorder.op(lse_of, out, row_stats), residual, dlse)
    launches.preprocess(rows)
    return Blocks(launches, along, moves, plan.tile.second).run(needs, rows)


class Blocks:
    """The launches for each range, and the arguments that they share."""

    def __init__(self, launches: BackwardLaunches, along: Tangents, moves: Needs, config: Any):
        assert isinstance(config, BlockedSecond)
        recorder, self.call = launches.recorder, launches.call
        self.launches, self.recorder, self.config, self.moves = launches, recorder, config, moves
        self.moving = along
        self.shared: dict[str, Tensor | None] = {}
        self.of_sinks: Tensor | None = None  # each row's part of the tangent of lse
        self.along: dict[str, Tensor | None] = {
            f"t{name}": None if x is None else recorder.op(rows_last, x) for name, x in zip("qkv", along, strict=False)
        }
        q, k = self.call.tensors[:2]
        batch, heads, rows, _ = q.shape
        self.unit, self.programs = config.unit, config.programs * describe_device(q.device).cores
        origin = self.call.settings.j0 % 8 if self.call.settings.dropout_p > 0 else 0
        self.pitch = max(1, -(-(k.shape[2] + origin) // self.unit)) * self.unit
        self.group = heads // max(k.shape[1], 1)
        pairs = MOST_BYTES // (WEIGHTS_OF_PAIR * q.element_size())
        self.ranges = ranges_of(batch * heads, self.group, rows, self.pitch, self.unit, pairs)

    def run(self, needs: Needs, rows: Rows) -> Results:
        q, k, v = self.call.tensors[:3]
        if self.moving.sinks is not None:
            sinks = self.call.tensors.sinks
            self.of_sinks = self.recorder.op(sink_tangents, sinks, self.moving.sinks, rows.lse, rows.residual)
        new, dtype = self.recorder.new, q.dtype
        tout = new(new_rows(q, q.shape[1], v.shape[-1], dtype))
        tlse = new(q.new_empty(lse_shape(q), dtype=torch.float32))
        dq = new(new_rows(q, q.shape[1], q.shape[-1], dtype)) if needs.q else None
        sums = [self.recorder.op(zero_sums, x) if needed else None for x, needed in ((k, needs.k), (v, needs.v))]
        if self.ranges:
            self.over_ranges(tout, tlse, dq, *sums)
        dk, dv = (None if x is None else self.recorder.op(partial(rounded, dtype), x) for x in sums)
        product = row_products(self.launches, tout, tlse) if needs.sinks else tlse
        dsinks = sink_gradient(self.launches, self.moving, needs, rows, tlse, product)
        others = (None,) * len(self.call.tensors.score_mod_tensors)  # a mask function's
        return tout, tlse, *Gradients(q=dq, k=dk, v=dv, sinks=dsinks, score_mod_tensors=others).flat()

    def over_ranges(self, tout: Tensor, tlse: Tensor, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None) -> None:
        most = max(x.num_heads * x.num_rows for x in self.ranges)
        dtype, tiles = tout.dtype, self.pitch // self.config.weights.block_n
        names = ("weight_p", "weight_t", "weight_ds", "weight_r")
        layouts = dict.fromkeys(names, ((most, self.pitch), dtype))
        w = self.recorder.workspace(tout, layouts | {"weight_sums": ((most, tiles, 3), torch.float32)})
        self.shared = self.shared_sums(tout)
        scale, kept = self.call.settings.scale, 1.0
        if self.call.settings.dropout_p > 0:
            kept = keep_scale(threshold(self.call.settings.dropout_p))
        t, dout = self.along, self.launches.dout
        for at in self.ranges:
            self.weigh(at, w, tlse)
            self.of_keys(at, tout, (w["weight_t"], self.launches.v), (w["weight_p"], t["tv"]), kept)
            if dq is not None:
                self.of_keys(at, dq, (w["weight_r"], self.launches.k), (w["weight_ds"], t["tk"]), scale)
            if dk is not None:
                self.of_rows(at, dk, (w["weight_r"], self.launches.q), (w["weight_ds"], t["tq"]), scale)
            if dv is not None:
                self.of_rows(at, dv, (w["weight_t"], dout), (None, None), kept)

    def shared_sums(self, like: Tensor) -> dict[str, Tensor | None]:
        """What programs need that share the keys of a sum: their sums, and semaphores."""
        config = self.config
        least = min(x.num_rows // config.rows.block_m * x.num_heads for x in self.ranges)
        if splits_of_sums(least, self.programs) == 1:
            return {"partials": None, "semaphores": None}
        shape = (self.programs, config.rows.block_m, config.columns)
        semaphores = self.recorder.op(partial(new_semaphores, like.device, self.programs))
        return {**self.recorder.workspace(like, {"partials": (shape, torch.float32)}), "semaphores": semaphores}

    def span(self, at: HeadRange) -> dict[str, Any]:
        return {
            "first_head": at.head,
            "first_row": at.row,
            "range_rows": at.num_rows // self.unit,
            "pitch": self.pitch // self.unit,
            "UNIT": self.unit,
            "num_tiles": None,
        }

    def scalars(self, config: KernelConfig, *results: Tensor | None) -> tuple[dict[str, Any], int]:
        """Scalars that all kernels take but the one that completes weights, and the alignment."""
        given, align = self.launches.inputs(*(x for x in (*self.along.values(), *results) if x is not None))
        return given | constants(self.call, config, align, self.moves), align

    def weigh(self, at: HeadRange, w: dict[str, Tensor], tlse: Tensor) -> None:
        """Store the weights of a range, and the tangents of lse."""
        config, span = self.config.weights, self.span(at)
        given, align = self.launches.inputs(*(x for x in self.along.values() if x is not None))
        for name, x in self.along.items():
            keys = name != "tq"
            given |= absent(name, "bhn" if keys else "bhm") if x is None else strides(name, x, align, keys=keys)
        given |= {**constants(self.call, config, align, self.moves), **STILL, **span, "BLOCK_D": min(64, self.unit)}
        tiles = at.num_rows // config.block_m * (self.pitch // config.block_n)
        self.launches.launch(WEIGHTS, {**self.along, **w, **NO_FEATURES}, tiles * at.num_heads, given)
        completed = COMPLETED | {"BLOCK_M": min(COMPLETED["BLOCK_M"], self.unit)}
        given = {**args.row_strides("tlse", tlse), **span, "TILE": config.block_n, **completed}
        self.launch(
            COMPLETE,
            {**w, "tlse": tlse, "of_sinks": self.of_sinks},
            at.num_rows // completed["BLOCK_M"] * at.num_heads,
            given,
        )

    def of_keys(self, at: HeadRange, result: Tensor, first: Operands, second: Operands, scale: float) -> None:
        """Store the product of weights with keys, or the sum of two such products, in `result`."""
        config = self.config.rows
        x, y = first[1], second[1]
        rows, align = self.operands((x, y), "bhn", result)
        given = {**rows, **strides("result", result, align), **self.of_sum(at, result, config, align, scale)}
        sums = at.num_rows // config.block_m * given.pop("column_blocks") * at.num_heads
        splits, shared = splits_of_sums(sums, self.programs), self.shared
        if splits > 1:
            given |= constants(self.call, config, align, self.moves, splits)
        else:
            shared = dict.fromkeys(shared)
        pointers = {"first": first[0], "second": second[0], "x": x, "y": y, "result": result, **shared}
        self.launch(OF_KEYS, pointers, sums * splits, given)

    def of_rows(self, at: HeadRange, sums: Tensor, first: Operands, second: Operands, scale: float) -> None:
        """Add the product of transposed weights with rows, or two such products, to `sums`."""
        config, together = self.config.keys, min(self.group, at.num_heads)
        x, y = first[1], second[1]
        rows, align = self.operands((x, y), "bhm")
        given = {**rows, **self.of_sum(at, sums, config, align, scale), "range_group": together}
        programs = self.pitch // config.block_n * given.pop("column_blocks") * (at.num_heads // together)
        pointers = {"first": first[0], "second": second[0], "x": x, "y": y, "sums": sums}
        self.launch(OF_ROWS, pointers, programs, given)

    def operands(self, factors: Operands, dims: str, *results: Tensor) -> tuple[dict[str, Any], int]:
        """Strides of the factors of weights, and their unit."""
        align, given = args.alignment([x for x in (*factors, *results) if x is not None]), {}
        for name, x in zip("xy", factors, strict=True):
            given |= absent(name, dims) if x is None else strides(name, x, align, keys=dims[-1] == "n")
        return given, align

    def of_sum(self, at: HeadRange, sums: Tensor, config: KernelConfig, align: int, scale: float) -> dict[str, Any]:
        """Scalars of a kernel whose programs have sums of some columns."""
        width = args.head_dim(sums.shape[-1])
        columns = min(self.config.columns, power_of_two(sums.shape[-1]))
        found = constants(self.call, config, align, self.moves)
        blocks = -(-sums.shape[-1] // columns)
        return {**found, **self.span(at), "scale": scale, "D": width, "BLOCK_D": columns, "column_blocks": blocks}

    def launch(self, kernel: Kernel, pointers: Pointers, programs: int, scalars: dict[str, Any]) -> None:
        """Launch a kernel that needs of the call what decides which blocks of keys rows see."""
        call = self.call
        given = {**args.feature_scalars(call), **args.seqlen_scalars(call), **self.launches.pointers}
        given |= {"num_heads_q": call.tensors.q.shape[1], "num_heads_k": call.tensors.k.shape[1], "num_tiles": None}
        at = {name: given[name] for name in ADDRESSES}
        self.recorder.launch(kernel, {**at, **pointers}, programs, {**{x: given[x] for x in VISIBILITY}, **scalars})


def zero_sums(x: Tensor) -> Tensor:
    """Sums for the rows of keys or values, fp32, 0."""
    return torch.zeros(x.shape, dtype=torch.float32, device=x.device)


def rounded(dtype: torch.dtype, sums: Tensor) -> Tensor:
    return sums.to(dtype)
