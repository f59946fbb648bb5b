"""The launches of a second derivative behind forward mode: row statistics, kernels for rows and for keys."""

from typing import Any

import torch
from torch import Tensor

from ....call.call import Call, Gradients, Needs, Tangents, new_rows
from ....call.plan import Plan
from ...gpu.kernel import Kernel
from ...gpu.pairs import pair_strides, with_contiguous_keys
from ...gpu.replay import Recorder
from ...replays import Results, with_inputs
from ...scalars import rows_last, strides
from ..tile_config import KernelConfig
from . import KERNELS
from . import arguments as args
from .backward_launches import ROWS_AT_ONCE, BackwardLaunches, Rows
from .gradients import lse_of, new_key_rows, no_gradient, residual_of, second_from_row_stats, sum_of_splits
from .tangents import absent, constants

ROWS, KEYS = (Kernel(f"{KERNELS}.second", f"second_{side}_kernel") for side in ("rows", "keys"))
ROW_PRODUCTS = Kernel(f"{KERNELS}.row_products", "row_products_kernel")
STILL: dict[str, Any] = {**pair_strides("dbias", None, 1), "stride_dslopes_b": None}
NO_FEATURES = dict.fromkeys(("dbias", "dslopes", "dsinks"))


def launch_second(recorder: Recorder, plan: Plan, call: Call, moves: Needs, needs: Needs) -> Results:
    """Record the passes; the recorder's inputs are the call's, the directions of inputs that `moves` names, the results
    of forward mode, then dout and dlse. Returns the tangents of out and lse, and then the gradients that `needs` asks
    for, flat.
    """
    call, along = with_inputs(call, moves, recorder.inputs)
    out, row_stats, tout, tlse, dout, dlse = recorder.inputs[-6:]
    assert out is not None
    assert row_stats is not None
    assert tout is not None
    assert tlse is not None
    dout = recorder.op(no_gradient, out) if dout is None else recorder.op(rows_last, dout)
    call = with_contiguous_keys(recorder, call)
    launches = BackwardLaunches(recorder, call, dout, None)
    lse = recorder.op(lse_of, out, row_stats)
    residual = recorder.op(residual_of, row_stats) if call.keeps_residual else None
    launches.preprocess(Rows(out, lse, residual, dlse))
    product = row_products(launches, tout, tlse)
    directions = Directions(launches, along, tlse, product)
    dq = directions.of_rows(plan.tile.second[0], moves, plan.num_splits) if needs.q else None
    dk, dv = directions.of_keys(plan.tile.second[1], moves) if needs.k or needs.v else (None, None)
    dsinks = sink_gradient(launches, along, needs, Rows(out, lse, residual, dlse), tlse, product)
    others = (None,) * len(call.tensors.score_mod_tensors)  # a mask function's tensors have no gradients
    dk, dv = (dk if needs.k else None), (dv if needs.v else None)
    gradients = Gradients(q=dq, k=dk, v=dv, sinks=dsinks, score_mod_tensors=others)
    return tout, tlse, *gradients.flat()


def sink_gradient(
    launches: BackwardLaunches, along: Tangents, needs: Needs, rows: Rows, tlse: Tensor, product: Tensor
) -> Tensor | None:
    """The gradient of sinks, if it is requested."""
    sinks = launches.call.tensors.sinks
    if not needs.sinks or sinks is None:
        return None
    of_rows = (rows.lse, rows.residual, tlse, product)
    return launches.recorder.op(second_from_row_stats, launches.row_stats, sinks, along.sinks, *of_rows)


def row_products(launches: BackwardLaunches, tout: Tensor, lse: Tensor) -> Tensor:
    """`<dout, tout>` of each row, fp32, as lse: `[B, H, S]`, or `[H, T]` of packed rows."""
    recorder, dout = launches.recorder, launches.dout
    tout = recorder.op(rows_last, tout)
    product = recorder.new(torch.empty_like(lse, memory_format=torch.contiguous_format))
    align, total_q = args.alignment([dout, tout]), product.shape[-1]
    tiles = -(-total_q // ROWS_AT_ONCE)
    scalars = {
        **strides("x", dout, align),
        **strides("y", tout, align),
        **args.row_strides("product", product),
        "num_tiles": tiles,
        "num_heads_q": dout.shape[1],
        "total_q": total_q,
        "D": args.head_dim(dout.shape[-1]),
        "ALIGN": align,
        "BLOCK_M": ROWS_AT_ONCE,
        "num_warps": 4,
    }
    pointers = {"x": dout, "y": tout, "product": product}
    recorder.launch(ROW_PRODUCTS, pointers, tiles * (product.numel() // max(total_q, 1)), scalars)
    return product


class Directions:
    """The launches of both kernels, and the arguments that they share."""

    def __init__(self, launches: BackwardLaunches, along: Tangents, tlse: Tensor, product: Tensor):
        recorder = launches.recorder
        self.launches, self.call, self.recorder = launches, launches.call, recorder
        self.along = {
            name: None if x is None else recorder.op(rows_last, x) for name, x in zip("qkv", along, strict=False)
        }
        self.pointers = {f"t{name}": x for name, x in self.along.items()} | {"tlse": tlse, "product": product}
        self.pointers |= NO_FEATURES
        self.of_numbers = {**args.row_strides("tlse", tlse), **args.row_strides("product", product), **STILL}

    def scalars(self, *results: Tensor) -> tuple[dict[str, Any], int]:
        moving = [x for x in self.along.values() if x is not None]
        given, align = self.launches.inputs(*results, *moving)
        for name, x in self.along.items():
            dims = "bhm" if name == "q" else "bhn"
            given |= absent(f"t{name}", dims) if x is None else strides(f"t{name}", x, align, keys=name != "q")
        return given | self.of_numbers | {"scale": self.call.settings.scale}, align

    def of_rows(self, config: KernelConfig, moves: Needs, splits: int) -> Tensor:
        """dq; the sums of programs that share a tile's keys are fp32 `[splits, ...]`, and are added at the end."""
        q = self.call.tensors.q
        dq = new_rows(q, q.shape[1], q.shape[-1], q.dtype)
        if splits > 1:
            dq = q.new_empty((splits, *q.shape), dtype=torch.float32)
        dq = args.new_result(self.recorder, self.call, dq, 0)
        given, align = self.scalars(dq)
        tiles = args.num_tiles(self.call, config.block_m)
        lists, list_strides = self.launches.lists(config)
        scalars = {
            **given,
            **list_strides,
            **strides("dq", dq if splits == 1 else dq[0], align),
            **constants(self.call, config, align, moves, splits),
            "stride_dq_split": None if splits == 1 else q.numel() // align,
            "num_tiles": tiles,
        }
        programs = tiles * q.shape[1] * args.dense_batch(q) * splits
        self.launches.launch(ROWS, {"dq": dq, **self.pointers, **lists}, programs, scalars)
        return dq if splits == 1 else self.recorder.op(sum_of_splits, dq)

    def of_keys(self, config: KernelConfig, moves: Needs) -> tuple[Tensor, Tensor]:
        dk, dv = (self.recorder.new(new_key_rows(self.call, x)) for x in self.call.tensors[1:3])
        given, align = self.scalars(dk, dv)
        tiles = args.num_key_tiles(self.call, config.block_n)
        lists, list_strides = self.launches.lists(config, of_keys=True)
        scalars = {
            **given,
            **list_strides,
            **strides("dk", dk, align, keys=True),
            **strides("dv", dv, align, keys=True),
            **constants(self.call, config, align, moves),
            "num_tiles": tiles,
        }
        programs = tiles * args.num_heads_k(self.call) * args.dense_batch(dk)
        self.launches.launch(KEYS, {"dk": dk, "dv": dv, **self.pointers, **lists}, programs, scalars)
        return dk, dv
