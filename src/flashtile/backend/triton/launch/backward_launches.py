"""The launches of backward kernels of sequences of any length."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....call.call import Call, new_rows
from ....call.formulas import score_formula
from ...gpu.block_lists import block_lists, summary
from ...gpu.formula import loads
from ...gpu.kernel import Kernel
from ...gpu.pointers import Described, Pointers
from ...gpu.replay import Recorder
from ...scalars import dlse_strides, lse_strides, rows_last, strides
from ..tile_config import KernelConfig
from . import KERNELS, formulas
from . import arguments as args
from .gradients import new_bias_gradients, new_key_rows, new_row_sums, new_sums, rounded_sums, sum_of_splits
from .split_rows import split_rows

ROWS_AT_ONCE = 64
PREPROCESS, DKDV, DQ, DBIAS, DCAPTURED = (
    Kernel(f"{KERNELS}.{name}", f"{name}_kernel") for name in ("preprocess", "dkdv", "dq", "dbias", "dcaptured")
)
ONE_LOOP, FROM_SUMS = (Kernel(f"{KERNELS}.mma.{name}", f"{name}_kernel") for name in ("backward", "from_sums"))


class Rows(NamedTuple):
    """Results of forward by rows, and the gradient of lse."""

    out: Tensor
    lse: Tensor
    residual: Tensor | None  # residual of lse
    dlse: Tensor | None


class BackwardLaunches:
    """The launches of one backward pass and the arguments that they share."""

    def __init__(self, recorder: Recorder, call: Call, dout: Tensor, mask_states: Tensor | None):
        self.recorder, self.call, self.dout = recorder, call, dout
        self.mask_states = mask_states
        self.q, self.k, self.v = (recorder.op(rows_last, x) for x in call.tensors[:3])
        self.pointers: Pointers = args.pointers(recorder, call, self.q, self.k, self.v) | {"dout": dout}
        self.row_stats = dout  # set by preprocess
        self.parts: tuple[Tensor, ...] | None = None

    def inputs(self, *results: Tensor, config: KernelConfig | None = None) -> tuple[dict[str, Any], int]:
        """Scalars that every kernel takes, and the alignment: the unit of strides."""
        given, align = self.row_inputs(*results, config=config)
        return given | args.row_stats_strides(self.row_stats), align

    def row_inputs(self, *results: Tensor, config: KernelConfig | None = None) -> tuple[dict[str, Any], int]:
        """As `inputs`, without the statistics of rows."""
        q, k, v, dout = self.rows(config)
        align = args.alignment([q, k, v, dout, *results])
        given = args.shared_scalars(self.call, q, k, v, align)
        return given | strides("dout", dout, align), align

    def rows(self, config: KernelConfig | None) -> tuple[Tensor, ...]:
        """`q`, `k`, `v` and `dout` as the kernel of a configuration reads them; float32 for `None`."""
        given = (self.q, self.k, self.v, self.dout)
        if config is None or not args.takes_split(self.q.dtype, config):
            return given
        if self.parts is None:
            self.parts = tuple(split_rows(self.recorder, x) for x in given)
        return self.parts

    def launch(
        self, kernel: Any, results: Pointers, programs: int, scalars: dict[str, Any], load: int | None = None,
        config: KernelConfig | None = None,
    ) -> None:  # fmt: skip
        """Launch a kernel that recomputes scores; `load` as for `formulas.device_function`."""
        rows = dict(zip(("q", "k", "v", "dout"), self.rows(config), strict=True))
        pointers = {**self.pointers, **rows, **results}
        formulas.launch(self.recorder, self.call, kernel, pointers, programs, scalars, partial=load is None, load=load)

    def lists(self, config: KernelConfig, *, of_keys: bool = False) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        """The pointer and the scalars of a kernel's lists of blocks."""
        sizes = config.block_m, config.block_n
        states = summary(self.recorder, self.call, *sizes, self.mask_states)
        self.mask_states = self.mask_states if states is None else states
        return block_lists(self.recorder, self.call, *sizes, states, of_keys=of_keys)

    def preprocess(self, rows: Rows) -> None:
        """Launch `preprocess_kernel`: two values a row, `[B, H, S, 2]` or `[H, T, 2]` with an even S or T; four of
        natural scores.
        """
        out, lse, _, dlse = rows
        *leading, total_q = lse.shape
        values = 4 if self.call.keeps_residual else 2
        row_stats = self.recorder.new(lse.new_empty((*leading, total_q + total_q % 2, values)))
        align = args.alignment([out, self.dout])
        tiles = -(-total_q // ROWS_AT_ONCE)
        pointers = {**rows._asdict(), "dout": self.dout, "row_stats": row_stats}
        programs = tiles * (lse.numel() // max(total_q, 1))
        scalars = {
            **strides("out", out, align),
            **strides("dout", self.dout, align),
            **lse_strides(lse),
            **dlse_strides(dlse),
            **args.row_stats_strides(row_stats),
            "DV": args.head_dim(out.shape[-1]),
            "num_tiles": tiles,
            "num_heads_q": out.shape[1],
            "total_q": total_q,
            "ALIGN": align,
            "BLOCK_M": ROWS_AT_ONCE,
            "NATURAL": self.call.keeps_residual,
            "num_warps": 4,
        }
        self.recorder.launch(PREPROCESS, pointers, programs, scalars)
        self.row_stats = row_stats
        self.pointers = {**self.pointers, "row_stats": Described(row_stats, Tensor.view, torch.int64)}

    def dkdv(self, config: KernelConfig) -> tuple[Tensor, Tensor]:
        """dk and dv, by position where keys are paged."""
        return self.of_keys(DKDV, config, {}, {})

    def one_loop(self, config: KernelConfig) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv by one kernel, whose programs add to sums of dq in any order."""
        self.dout = self.recorder.op(args.aligned_rows, self.dout)
        self.pointers = {**self.pointers, "dout": self.dout}
        sums = self.recorder.op(partial(new_row_sums, args.row_sums_shape(self.call, config)), self.call.tensors.q)
        heads = args.num_heads_k(self.call) * args.dense_batch(self.call.tensors.k)
        more = args.row_sums_strides("dq", sums) | {"heads_at_once": args.heads_at_once(self.call, heads)}
        dk, dv = self.of_keys(ONE_LOOP, config, {"dq": sums}, more)
        return self.from_sums(sums, config), dk, dv

    def from_sums(self, sums: Tensor, config: KernelConfig) -> Tensor:
        """dq from its sums, in the order of the fragments of products."""
        call, q = self.call, self.call.tensors.q
        dq = args.new_result(self.recorder, call, new_rows(q, q.shape[1], q.shape[-1], q.dtype), 0)
        tiles, align = args.num_tiles(call, config.block_m), args.alignment([dq])
        given = args.seqlen_scalars(call)
        scalars = {
            **args.row_sums_strides("sums", sums),
            **strides("dq", dq, align),
            **args.constants(call, config._replace(num_warps=4), align),
            "num_tiles": tiles,
            "num_heads_q": q.shape[1],
            **{name: given[name] for name in ("batch", "total_q")},
            "scale": call.settings.scale,
        }
        pointers = {"sums": sums, "dq": dq, **{x: self.pointers[x] for x in ("cu_seqlens_q", "seqused_q")}}
        self.recorder.launch(FROM_SUMS, pointers, tiles * q.shape[1] * args.dense_batch(dq), scalars)
        return dq

    def of_keys(
        self, kernel: Kernel, config: KernelConfig, pointers: Pointers, more: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """dk and dv by a kernel whose programs own blocks of keys."""
        dk, dv = (self.recorder.new(new_key_rows(self.call, x)) for x in self.call.tensors[1:3])
        given, align = self.inputs(dk, dv, config=config)
        tiles = args.num_key_tiles(self.call, config.block_n)
        programs = tiles * args.num_heads_k(self.call) * args.dense_batch(dk)
        lists, list_strides = self.lists(config, of_keys=True)
        scalars = {
            **given,
            **list_strides,
            **strides("dk", dk, align, keys=True),
            **strides("dv", dv, align, keys=True),
            **args.constants(self.call, config, align),
            **more,
            "num_tiles": tiles,
            "scale": self.call.settings.scale,
        }
        self.launch(kernel, {"dk": dk, "dv": dv, **pointers, **lists}, programs, scalars, config=config)
        return dk, dv

    def dq(self, config: KernelConfig, lse: Tensor, slopes: bool) -> tuple[Tensor, Tensor | None]:
        """dq, and each row's part of the gradient of its slope, shaped as lse."""
        q = self.call.tensors.q
        dq = args.new_result(self.recorder, self.call, new_rows(q, q.shape[1], q.shape[-1], q.dtype), 0)
        dslopes = args.new_result(self.recorder, self.call, torch.empty_like(lse), 0) if slopes else None
        given, align = self.inputs(dq, config=config)
        tiles = args.num_tiles(self.call, config.block_m)
        programs = tiles * dq.shape[1] * args.dense_batch(dq)
        lists, list_strides = self.lists(config)
        scalars = {
            **given,
            **list_strides,
            **strides("dq", dq, align),
            **args.row_strides("dslopes", dslopes),
            **args.constants(self.call, config, align),
            "num_tiles": tiles,
            "scale": self.call.settings.scale,
        }
        self.launch(DQ, {"dq": dq, "dslopes": dslopes, **lists}, programs, scalars, config=config)
        return dq, dslopes

    def dbias(self, config: KernelConfig) -> Tensor:
        """dbias, shaped as the bias: in its dtype where one program adds all of an element, else fp32."""
        bias = self.call.tensors.bias
        assert bias is not None
        config = unsplit(config)
        tiles = args.dbias_scalars(self.call, bias, config)
        programs, splits = tiles.pop("programs"), tiles["splits"]
        # A bias may have more keys than memory holds.
        written = programs > 0 and all(
            n <= most for n, most in zip(bias.shape, args.bias_shape(self.call), strict=True)
        )
        dbias = self.recorder.op(partial(new_bias_gradients, splits, written), bias)
        given, align = self.inputs()
        constants = args.constants(self.call, config, align)
        scalars = {**given, **tiles, **constants, **args.dbias_strides(dbias), "num_tiles": None}
        scalars["BIAS_ONCE"] = config.bias_once
        self.launch(DBIAS, {"dbias": dbias}, programs, scalars)
        return self.recorder.op(sum_of_splits, dbias)

    def dcaptured(self, config: KernelConfig, needed: Sequence[bool]) -> list[Tensor | None]:
        """The gradients of the tensors that a score_mod captures, fp32; a launch for each load of a tensor."""
        formula = score_formula(self.call)
        if formula is None or not any(needed):
            return [None] * len(needed)
        tensors = self.call.tensors.score_mod_tensors
        sums = [self.recorder.op(new_sums, x) if wanted else None for x, wanted in zip(tensors, needed, strict=True)]
        given, align = self.inputs()
        # Exact sums take sixty registers for each sixteen pairs of a thread.
        config = unsplit(config)._replace(
            block_m=min(config.block_m, 64), block_n=min(config.block_n, 32), num_stages=1
        )
        tiles = args.num_tiles(self.call, config.block_m)
        programs = tiles * self.q.shape[1] * args.dense_batch(self.q)
        constants = args.constants(self.call, config, align)
        for n, load in enumerate(loads(formula)):
            if needed[load.tensor]:
                inputs = formulas.function_of(self.call, formula, load=n).position_inputs
                by = {"BY_ROW": bool(inputs & {"score", "q_idx"}), "BY_KEY": bool(inputs & {"score", "k_idx"})}
                scalars = {**given, **constants, **by, "num_tiles": tiles}
                self.launch(DCAPTURED, {"sums": sums[load.tensor]}, programs, scalars, load=n)
        return [None if x is None else self.recorder.op(rounded_sums, tensors[n], x) for n, x in enumerate(sums)]


def unsplit(config: KernelConfig) -> KernelConfig:
    """The configuration of a kernel that reads float32 rows as they are."""
    return config._replace(precision="tf32x3") if config.precision == "bf16x6" else config
